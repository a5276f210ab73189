"""Results: named tables and their meta, saved completely or not at all."""

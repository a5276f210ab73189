"""What every result is: named tables with their meta, saved whole or not at all."""

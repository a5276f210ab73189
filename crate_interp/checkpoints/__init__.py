"""From bytes to a hooked model: one strict key map per published layout, our own format, and the table of models."""

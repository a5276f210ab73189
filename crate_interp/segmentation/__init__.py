"""Do attention maps segment? Scores of every head, compared with chance."""

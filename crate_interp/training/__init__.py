"""For other people's training loops: what is measured, and what is added to a loss."""

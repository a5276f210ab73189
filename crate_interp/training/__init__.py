"""Tools for a training loop: a watch that measures the model, and a loss term."""

"""Intervals and tests of means, shares, ratios and networks, and the words they justify."""

"""Intervals and tests of means, shares, ratios and networks, and the words that they allow."""

"""The audit, which measures each layer on each sample against the claims of the papers."""

"""Questions about a model: what is measured over samples, chunk by chunk, and how it runs."""

"""The code that all streamed verbs share: a pass over data in chunks, in memory or in a folder."""

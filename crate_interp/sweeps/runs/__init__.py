"""What every streamed verb shares: a pass over data in chunks, in memory or in a folder."""

"""The atlas of the dictionary: what each atom fires on, and what it changes."""

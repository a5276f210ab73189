"""From bytes to a model: the table of public files, published layouts, our own format."""

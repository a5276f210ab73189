"""Attribution graphs: why a model gave one answer, in the nodes of its own sparse codes."""

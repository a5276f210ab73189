"""Long measurements on the disk: chunks, their ledger, shards, and the order of merging."""

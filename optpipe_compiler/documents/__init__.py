"""What is on disk: the two files, their records, text, versions, units and JSON Schemas."""

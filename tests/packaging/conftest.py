"""Fixtures that prepare a directory for the commands of a document: `docs_NAME` for `setup NAME`."""

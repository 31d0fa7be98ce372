"""HTML pages that commands write: each is one self-contained file, with tables that need no JavaScript."""

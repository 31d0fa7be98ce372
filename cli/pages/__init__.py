"""Pages that commands write: one self-contained HTML file each, with tables that say the same without script."""

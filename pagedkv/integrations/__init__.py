"""pagedkv in other libraries. Each module imports the one it is named after; nothing of pagedkv imports these."""

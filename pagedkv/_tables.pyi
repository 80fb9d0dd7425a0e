# Nothing here is for Python: see _tables.pxd.

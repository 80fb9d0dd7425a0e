# Nothing here is for Python: see _beginnings.pxd.

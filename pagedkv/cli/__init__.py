"""The commands `info`, `bench` and `plan` of `python -m pagedkv`."""

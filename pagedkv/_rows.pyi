from typing_extensions import disjoint_base

# Nothing here is for Python: see _rows.pxd.

@disjoint_base
class BlockRows: ...
@disjoint_base
class KvRows: ...

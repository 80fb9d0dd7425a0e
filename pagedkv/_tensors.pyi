from typing import Any, Protocol, TypeAlias, final

import numpy as np
import numpy.typing as npt

class _HasDlpack(Protocol):
    def __dlpack__(self) -> Any: ...

# Values that lie where they are: of NumPy, whose array of ml_dtypes.bfloat16 a checker does not know, or by DLPack.
_Values: TypeAlias = npt.NDArray[np.float32 | np.float16 | np.uint16] | npt.NDArray[Any] | memoryview[Any] | _HasDlpack

@final
class Taken: ...

/* The bodies of all kernels, in the words that simd_<isa>.c has defined before. No guard: every such file ends with it. */

#include "simd_math.h"
#include "simd_turn.h"
#include "simd_dtypes.h" /* and, for each dtype, attend_rows.h */
#include "attend_tile.h"

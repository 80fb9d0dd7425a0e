/* Ends one instruction set: its macros go, its functions stay. No guard: included once per set. */
#undef SIMD_ISA
#undef LANES
#undef ACC_VECS
#undef DOT_ROWS
#undef STORES_SUMS16
#undef IN_REGISTER

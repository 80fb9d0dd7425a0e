/* Ends one instruction set: its macros go, its functions stay. No guard: included once per set. */
#undef SIMD_ISA
#undef LANES
#undef ACC_VECS
#undef IN_REGISTER

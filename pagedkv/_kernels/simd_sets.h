/* Which of the instruction sets that this build has the machine can run. For simd.pyx only, which is linked with them. */
#ifndef PAGEDKV_SIMD_SETS_H
#define PAGEDKV_SIMD_SETS_H

#include "simd.h"

#ifdef SIMD_HAS_AVX
#include <cpuid.h>

/* gcc's __builtin_cpu_supports has not always known this one. */
static int simd_has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}
#endif

/* The i-th extension that matters to these kernels: its name, "" where the machine has not got it, NULL past the last. */
static const char *simd_feature(int i) {
#ifdef SIMD_HAS_AVX
#define HAS(name) (__builtin_cpu_supports(name) ? name : "")
    switch (i) {
    case 0:
        return HAS("avx");
    case 1:
        return HAS("avx2");
    case 2:
        return HAS("fma");
    case 3:
        return simd_has_f16c() ? "f16c" : "";
    case 4:
        return HAS("avx512f");
    case 5:
        return HAS("avx512bw");
    case 6:
        return HAS("avx512vnni");
    }
#undef HAS
#elif defined(SIMD_HAS_NEON)
    if (i == 0)
        return "neon";
#endif
    (void)i;
    return NULL;
}

/* The i-th set that this machine can run, the best first; NULL past the last. */
static const simd_kernels *simd_supported(int i) {
    const simd_kernels *sets[5];
    int n = 0;
#ifdef SIMD_HAS_AVX
    if (__builtin_cpu_supports("avx512f"))
        sets[n++] = &simd_kernels_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && simd_has_f16c())
        sets[n++] = &simd_kernels_avx2;
#endif
#ifdef SIMD_HAS_SSE2
    sets[n++] = &simd_kernels_sse2;
#endif
#ifdef SIMD_HAS_NEON
    sets[n++] = &simd_kernels_neon;
#endif
    sets[n++] = &simd_kernels_plain;
    return i >= 0 && i < n ? sets[i] : NULL;
}

#endif

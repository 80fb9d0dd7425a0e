/* Every instruction set that this compiler can aim at, and which of them this machine can run. For one module only:
 * the kernels are static. */
#ifndef PAGEDKV_SIMD_SETS_H
#define PAGEDKV_SIMD_SETS_H

#include "simd.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

/* --- every instruction set that this compiler can aim at, the plainest first ----------------------- */

#define SIMD_ISA plain
#include "simd_plain.h"
#include "simd_math.h"
#include "simd_dtypes.h"
#include "attend_tile.h"
#include "simd_end.h"

#if defined(__SSE2__) || defined(_M_X64)
#define SIMD_HAS_SSE2 1
#define SIMD_ISA sse2
#include "simd_sse2.h"
#include "simd_math.h"
#include "simd_dtypes.h"
#include "attend_tile.h"
#include "simd_end.h"
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define SIMD_HAS_AVX 1

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define SIMD_ISA avx2
#include "simd_avx2.h"
#include "simd_math.h"
#include "simd_dtypes.h"
#include "attend_tile.h"
#include "simd_end.h"
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f")
#endif
#define SIMD_ISA avx512
#include "simd_avx512.h"
#include "simd_math.h"
#include "simd_dtypes.h"
#include "attend_tile.h"
#include "simd_end.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#if defined(__aarch64__) && defined(__ARM_NEON)
#define SIMD_HAS_NEON 1
#define SIMD_ISA neon
#include "simd_neon.h"
#include "simd_math.h"
#include "simd_dtypes.h"
#include "attend_tile.h"
#include "simd_end.h"
#endif

#ifdef SIMD_HAS_AVX
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
        sets[n++] = &kernels_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && simd_has_f16c())
        sets[n++] = &kernels_avx2;
#endif
#ifdef SIMD_HAS_SSE2
    sets[n++] = &kernels_sse2;
#endif
#ifdef SIMD_HAS_NEON
    sets[n++] = &kernels_neon;
#endif
    sets[n++] = &kernels_plain;
    return i >= 0 && i < n ? sets[i] : NULL;
}

#endif

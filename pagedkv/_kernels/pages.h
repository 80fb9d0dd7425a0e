/* Memory that goes back to the system, page by page, and reads as zeros when it is next looked at. */
#ifndef PAGEDKV_PAGES_H
#define PAGEDKV_PAGES_H

#include <stddef.h>
#include <stdint.h>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

/* Gives back the whole pages between two addresses; returns their bytes. 0 where a system has no such thing. */
static inline ptrdiff_t trim_pages(char *start, char *end)
{
#if defined(__linux__)
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t first = ((uintptr_t)start + page - 1) / page * page, last = (uintptr_t)end / page * page;
    if (first < last && madvise((void *)first, last - first, MADV_DONTNEED) == 0)
        return (ptrdiff_t)(last - first);
#else
    (void)start;
    (void)end;
#endif
    return 0;
}

#endif

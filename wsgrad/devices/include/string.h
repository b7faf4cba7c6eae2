/* The memory functions that a program on a wsgrad CPU device may use; they are the C library's of the node. */
#ifndef WSGRAD_STRING_H
#define WSGRAD_STRING_H

#include <stddef.h>

int memcmp(const void *, const void *, size_t);
void *memcpy(void *__restrict, const void *__restrict, size_t);
void *memmove(void *, const void *, size_t);
void *memset(void *, int, size_t);

#endif

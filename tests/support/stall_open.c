// To be preloaded: opening a picture (.ppm) waits while the file $STALL_WHILE exists, as on a network file system that
// hangs; in the rank $STALL_RANK, or in every rank; a picture with $STALL_PATH in its path, or any. What is reached
// first makes $STALL_WHILE.reached.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void stall(const char* path) {
  const char *flag = getenv("STALL_WHILE"), *only = getenv("STALL_RANK"), *rank = getenv("TOPKNOT_RANK"),
             *path_part = getenv("STALL_PATH");
  if (!flag || !rank || (only && strcmp(only, rank) != 0) || !strstr(path, ".ppm")) return;
  if (path_part && !strstr(path, path_part)) return;
  for (int waited = 0; access(flag, F_OK) == 0; waited = 1, usleep(10000)) {
    char reached[4096];
    snprintf(reached, sizeof reached, "%s.reached", flag);
    if (!waited) close(creat(reached, 0600));
  }
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define STALL_OPEN(name)                                   \
  int name(const char* path, int flags, ...) {             \
    va_list rest;                                          \
    va_start(rest, flags);                                 \
    const mode_t mode = va_arg(rest, mode_t);              \
    va_end(rest);                                          \
    REAL(name);                                            \
    stall(path);                                           \
    return real(path, flags, mode);                        \
  }
#define STALL_FOPEN(name)                                  \
  FILE* name(const char* path, const char* mode) {         \
    REAL(name);                                            \
    stall(path);                                           \
    return real(path, mode);                               \
  }

STALL_OPEN(open)
STALL_OPEN(open64)
STALL_FOPEN(fopen)
STALL_FOPEN(fopen64)

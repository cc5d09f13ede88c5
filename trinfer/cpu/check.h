/* Checked mode: every access of a kernel goes through the runtime (check.c), which knows the arguments' memory. */
#include <stdint.h>

#if defined(__GNUC__) && !defined(__clang__)
/* an offset that does not fit in 32 bits has to go wrong here as it does on a GPU */
#pragma GCC optimize("wrapv")
#endif

/* One access in the source of a kernel; `args`: bit k is set if argument k may be what the pointer points into;
   `is_anywhere`: it may also point elsewhere, because it was read from memory. */
struct t_site { const char *argument, *line; uint64_t args; int bytes, site, is_anywhere; };

void* t_check_read(const struct t_site* site, const void* place);
void* t_check_write(const struct t_site* site, const void* place, const void* value);
void* t_check_atomic(const struct t_site* site, const void* place, int acquires, int releases);
void t_check_program(int64_t program);

#define T_READ(site, p) (*(__typeof__(p))t_check_read(site, p))
#define T_WRITE(site, p, v) do { \
    __typeof__(p) t_p = (p); __typeof__(*t_p) t_v = (v); \
    *(__typeof__(t_p))t_check_write(site, t_p, &t_v) = t_v; \
  } while (0)
#define T_ATOM(site, p, acquires, releases) ((__typeof__(p))t_check_atomic(site, p, acquires, releases))

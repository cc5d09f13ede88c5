/* Runs the programs of a launch over the threads of torch's OpenMP pool. */
#include <stdint.h>

typedef void (*programs)(const void* args, int64_t begin, int64_t end);

/* the entry of GNU's OpenMP library, which LLVM's has too: called by name, no compiler brings a pool of its own */
void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags);

struct launched {
  programs run;
  const void* args;
  int64_t count, share, next;
};

static void work(void* data)
{
  struct launched* l = data;
  int64_t begin;
  while ((begin = __atomic_fetch_add(&l->next, l->share, __ATOMIC_RELAXED)) < l->count)
    l->run(l->args, begin, begin + l->share < l->count ? begin + l->share : l->count);
}

/* shares of the grid are handed out on demand, eight a thread, so that a disturbed core does not hold up the others */
void launch(programs run, const void* args, int64_t count, int threads)
{
  if (count <= 1 || threads <= 1) {
    run(args, 0, count);
    return;
  }
  int64_t share = count / (8 * (int64_t)threads);
  struct launched l = {run, args, count, share < 1 ? 1 : share, 0};
  GOMP_parallel(work, &l, (unsigned)threads, 0);
}

/* Runs the programs of a launch over the threads of torch's OpenMP pool. */
#include <stdint.h>

typedef void (*programs)(const void* args, int64_t begin, int64_t end);

/* shares of the grid are handed out on demand, eight a thread, so that a disturbed core does not hold up the others */
void launch(programs run, const void* args, int64_t count, int threads)
{
  if (count <= 1 || threads <= 1) {
    run(args, 0, count);
    return;
  }
  int64_t share = count / (8 * (int64_t)threads);
  share = share < 1 ? 1 : share;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t begin = 0; begin < count; begin += share)
    run(args, begin, begin + share < count ? begin + share : count);
}

/* Top-k of two ranks' gradients by libtopknot, both ranks in one process:
 *   cc docs/examples/compress.c -Iinclude -Lbuild/lib -ltopknot -Wl,-rpath,build/lib -o compress && ./compress
 */
#include <stdio.h>
#include <stdlib.h>
#include <topknot.h>

enum { RANKS = 2, ROWS = 64, COLS = 32, SIZE = ROWS * COLS };

static void check(topknot_result result) {
  if (result < TOPKNOT_INVALID) return;
  fprintf(stderr, "topknot: %s\n", topknot_error());
  exit(1);
}

int main(void) {
  static float gradients[RANKS][SIZE];
  const int64_t shape[] = {ROWS, COLS};
  const topknot_tensor tensor = {"layer.weight", shape, 2};
  const char* keys[] = {"density=0.01", "codec=auto"};
  const int32_t which = 0;
  topknot_compressor* compressors[RANKS];
  for (int r = 0; r < RANKS; ++r)
    check(topknot_create("topk", keys, 2, &tensor, 1, r, RANKS, &compressors[r]));

  for (int step = 0; step < 3; ++step) {
    topknot_round* rounds[RANKS];
    const void* blocks[RANKS];
    size_t bytes[RANKS];
    for (int r = 0; r < RANKS; ++r) {
      for (int i = 0; i < SIZE; ++i) gradients[r][i] = (float)((i * 37 + r * 11 + step * 5) % 101) / 100;
      const void* from = gradients[r];
      const topknot_step when = {step, 0, 1};
      topknot_message message;
      check(topknot_encode(compressors[r], &when, &which, 1, &from, TOPKNOT_FLOAT32, 1, &rounds[r]));
      check(topknot_message_of(rounds[r], &message));
      blocks[r] = message.block, bytes[r] = message.block_bytes; /* over a network: an all-gather */
    }
    for (int r = 0; r < RANKS; ++r) check(topknot_decode(rounds[r], blocks, bytes));
    const size_t sent = bytes[0];
    for (int r = 0; r < RANKS; ++r) {
      void* average = gradients[r];
      check(topknot_commit(rounds[r], &average, TOPKNOT_FLOAT32, 1));
    }
    double sum = 0;
    int entries = 0, equal = 1;
    for (int i = 0; i < SIZE; ++i) {
      sum += gradients[0][i], entries += gradients[0][i] != 0, equal &= gradients[0][i] == gradients[1][i];
    }
    printf("step %d: %zu bytes from rank 0, %d entries in the average, sum %.3f, %s on both ranks\n", step,
           sent, entries, sum, equal ? "equal" : "different");
  }
  for (int r = 0; r < RANKS; ++r) topknot_destroy(compressors[r]);
  return 0;
}

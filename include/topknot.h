/* libtopknot: gradient compression for other programs, as a C interface.
 *
 * A compressor compresses one rank's gradients and makes the ranks' average from what all of them sent. It
 * never communicates: the caller sends its messages, over whatever it has. It has the methods of Topknot's
 * `train`, by the same code.
 *
 *   topknot_create()                       once per rank
 *   topknot_encode() -> topknot_round      of some or all tensors, in the same order on all ranks
 *     topknot_message_of(round)            gather its block from all ranks, or sum its numbers over them
 *     topknot_pieces_of(round)             whether a rank needs a piece of the block alone
 *     topknot_decode(round, ...)           until it says TOPKNOT_DONE or TOPKNOT_NOT_FINITE
 *   topknot_commit(round, averages)        writes the averages and keeps what was not sent, or
 *   topknot_discard(round)                 forgets the step: everything is as before topknot_encode()
 *
 * All ranks must commit or all discard. TOPKNOT_NOT_FINITE (a NaN or an infinity in some rank's gradients, or an average
 * that could overflow) is found by every rank alike, and such a round can only be discarded.
 *
 * Functions return TOPKNOT_OK or an error, of which topknot_error() has the text; nothing has changed then,
 * unless said otherwise. No exception leaves the library, and nothing here ends the process. A compressor and
 * its rounds may be used by several threads at once; calls on one compressor wait for each other. A process that
 * was forked after a call hangs in OpenMP.
 *
 * With key device=cuda all pointers to gradients, blocks, sums and averages are to a GPU's memory. A call waits until the
 * GPU is done with it, on a stream of the compressor's own: what the caller's streams write must be there before the call.
 * A block then has the same length on all ranks and in all steps of one density; blocks given to topknot_decode() begin at
 * multiples of 4 bytes, and a damaged one is TOPKNOT_NOT_FINITE. States and residuals are the host's.
 *
 * Numbers are little-endian; positions and lengths fit memory: a tensor has at most 2^31 - 1 elements.
 */
#ifndef TOPKNOT_H
#define TOPKNOT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised where a program that was compiled for the last one would no longer work. */
#define TOPKNOT_INTERFACE 1

typedef struct topknot_compressor topknot_compressor;
typedef struct topknot_round topknot_round;

typedef enum topknot_result {
  TOPKNOT_OK = 0,
  TOPKNOT_MORE = 1,       /* topknot_decode(): the round has another message */
  TOPKNOT_DONE = 2,       /* topknot_decode(): commit, or discard */
  TOPKNOT_NOT_FINITE = 3, /* topknot_decode(): discard; so do all ranks */
  TOPKNOT_INVALID = 4,    /* a wrong argument, key, value or call; a damaged message or state */
  TOPKNOT_FAILED = 5      /* out of memory, or a fault of the library */
} topknot_result;

typedef int32_t topknot_type;
enum { TOPKNOT_FLOAT32 = 0, TOPKNOT_BFLOAT16 = 1, TOPKNOT_FLOAT16 = 2 };

/* A tensor to compress, row-major. Names are unique; `dimensions` of 0 is a scalar. */
typedef struct topknot_tensor {
  const char* name;
  const int64_t* shape;
  size_t dimensions;
} topknot_tensor;

typedef struct topknot_step {
  int64_t step;   /* from 0, the same on all ranks; part of what random methods draw from */
  double density; /* of this step, in (0, 1]; 0: the key's */
  double lr;      /* learning rate, for key lr_inside */
} topknot_step;

/* What this rank sends. Either a block, bytes of any length that every rank gets from every rank; or `count`
 * numbers of `sum_type` at `sum`, to be replaced by their sum over the ranks. The memory is the round's, until it
 * ends or topknot_decode() says TOPKNOT_MORE. */
typedef struct topknot_message {
  const void* block;
  size_t block_bytes;
  void* sum;
  size_t sum_count;
  topknot_type sum_type; /* TOPKNOT_FLOAT32 or TOPKNOT_BFLOAT16 */
} topknot_message;

/* What a rank sends of a tensor; with scope=model, of the vector of all that are compressed. For studies, on the CPU. */
typedef struct topknot_sent {
  size_t target;        /* entries that the density asks for; 0: the method sends no entries */
  size_t count;         /* entries sent, or the numbers that the method sends in their place */
  size_t over_capacity; /* entries that key capacity kept back */
  double threshold;     /* what magnitudes were compared with; 0: nothing */
  /* Before its weight, as all ranks decode it: `entries` values at these positions, or with null indices of all
   * positions. Null values before topknot_decode() says TOPKNOT_DONE, and of methods that do not know it (dense, and
   * the low-rank ones). The memory is the round's. */
  const uint32_t* indices;
  const float* values;
  size_t entries;
} topknot_sent;

const char* topknot_version(void);
int topknot_interface(void); /* TOPKNOT_INTERFACE of the library */
/* Of the calling thread's last call that failed: one sentence, valid until its next call that fails. */
const char* topknot_error(void);
/* JSON: {"methods": {NAME: {"help": TEXT, "options": [{"name", "default", "help", "least", "greatest", "choices"}],
 * "settings": {KEY: TEXT}}}, "recipes": {NAME: {"help", "method", "settings"}}, "keys": [the options that all methods
 * share, alike], "pieces": {"select": [NAMES], "memory", "codec", "values"}}. Settings are what the method's paper says
 * of keys of a run file ("compress.density", "exchange.outer.lr"); a recipe is a method with local steps. The library's
 * memory. */
const char* topknot_methods(void);

/* keys: "density=0.001", "codec=auto", ... as in section `compress` of a run file (docs/configuration.md), of
 * which there are density, select, memory, codec, values, transform, aggregate, feedback_decay, capacity,
 * dense_1d, min_numel, lr_inside, and the method's own. Those that are not given have what the method's settings
 * (topknot_methods()) say, but for lr_inside, else their defaults; also
 *   momentum=M, nesterov=true|false  of memories that own the optimizer's momentum (dgc); refused elsewhere
 *   seed=N                           of random methods; the same on all ranks
 *   scope=tensor|model               each tensor is compressed for itself (default), or all that are as one vector
 *   threads=N                        of a call; default: OpenMP's own number. Beside other programs on the same cores
 *                                    start the process with GOMP_SPINCOUNT=3000, or its threads hold up each other
 *   device=cpu|cuda|cuda:N           where gradients, messages and averages lie: the host's memory (default), that of the
 *                                    GPU on which the thread works, or of GPU N. For methods that have kernels: topk, lags,
 *                                    threshold, gaussiank, dgc, gradient_dropping, regtopk, signsgd, qsgd, dense with most
 *                                    of their keys; others are refused. Averages, residuals and states have the bits of
 *                                    the CPU's (regtopk's nearly always: docs/gpu.md).
 *   undo=true                        keeps what topknot_undo() needs: what the method keeps, once more, during a
 *                                    round twice
 * Tensors that dense_1d (default true) and min_numel leave uncompressed go with the others' messages as they
 * are. */
topknot_result topknot_create(const char* method, const char* const* keys, size_t key_count,
                              const topknot_tensor* tensors, size_t tensor_count, int rank, int ranks,
                              topknot_compressor** made);
/* Also of the rounds that are under way. Null is nothing. */
void topknot_destroy(topknot_compressor* compressor);

/* Compresses gradients[i] times `scale`, of tensor which[i] (its place in topknot_create()), for i < count;
 * the gradients are read before the call returns. Addresses are multiples of the type's size. Tensors of a round that
 * is not committed or discarded yet are refused; with scope=model a round has all tensors, in order. */
topknot_result topknot_encode(topknot_compressor* compressor, const topknot_step* step, const int32_t* which,
                              size_t count, const void* const* gradients, topknot_type type, double scale,
                              topknot_round** round);
/* Weights of the ranks in the average, for instance the sizes of their shards: `ranks` of them, above 0, the same on all
 * ranks; only their ratios matter. For rounds that begin later. Null: equal, as in the beginning. Not part of a state. Where they
 * change, dense sums in few bits forget a part of the last average's rounding. */
topknot_result topknot_set_weights(topknot_compressor* compressor, const double* weights);
/* What is to be sent now. */
topknot_result topknot_message_of(topknot_round* round, topknot_message* message);
/* *pieces: 0, or the block of what is to be sent now consists of so many pieces of one length, one for each rank, and
 * topknot_decode() takes in place of whole blocks the ranks' pieces for this one. */
topknot_result topknot_pieces_of(topknot_round* round, size_t* pieces);
/* blocks[r], block_bytes[r]: rank r's block, own included, where the message is a block; else both may be null,
 * and the sum is in the message's memory. After an error the round can only be discarded. */
topknot_result topknot_decode(topknot_round* round, const void* const* blocks, const size_t* block_bytes);
/* Of tensor i of the round, in topknot_encode()'s order. */
topknot_result topknot_sent_of(topknot_round* round, size_t i, topknot_sent* sent);
/* averages[i]: gets the average over the ranks times `scale`, may be gradients[i]; null: not wanted. Addresses are
 * multiples of the type's size. Ends the round, also after an error. */
topknot_result topknot_commit(topknot_round* round, void* const* averages, topknot_type type, double scale);
void topknot_discard(topknot_round* round); /* ends the round; null is nothing */

/* Takes back the last commit of every tensor whose step was `step`: residuals and what methods carry are as
 * before it. For steps that are found to be of no use after they were committed, by all ranks alike. */
topknot_result topknot_undo(topknot_compressor* compressor, int64_t step);

/* Residuals and what methods carry: this rank's. Between rounds only. With room < *bytes nothing is written, and
 * *bytes is what it takes. */
topknot_result topknot_save(topknot_compressor* compressor, void* to, size_t room, size_t* bytes);
/* Of a compressor of the same method, names, shapes, rank count and keys; but density, codec, capacity, threads,
 * device and undo may differ. After an error nothing has changed. */
topknot_result topknot_load(topknot_compressor* compressor, const void* from, size_t bytes);
/* The residual of tensor `which`, float32 of its length: what is added to its next gradient. That is what was not sent,
 * times feedback_decay (with transform=block in the order of blocks, with dct their coefficients). *has: whether the
 * method keeps one; nothing is written if not. Between rounds only. */
topknot_result topknot_residual(topknot_compressor* compressor, int32_t which, float* residual, int* has);
/* Replaces it; TOPKNOT_INVALID if the method keeps none, or a number is not finite. */
topknot_result topknot_set_residual(topknot_compressor* compressor, int32_t which, const float* residual);

#ifdef __cplusplus
}
#endif
#endif

// Deep Gradient Compression (Lin, Han, Mao, Wang, Dally, ICLR 2018, arXiv 1712.01887), whole. Its parts, and the
// key that turns each of them off or changes it:
//
//   momentum correction      compress.memory: dgc (compress/memory/dgc.h); residual leaves momentum to the
//                            optimizer, after the average
//   Nesterov's form          optimizer.nesterov (the authors' code; with nothing masked it is torch's)
//   momentum factor masking  compress.momentum_masking
//   local gradient clipping  compress.clip: thr_G. The paper clips gradients that are divided by N already at
//                            N^-1/2 thr_G; here gradients are means of a rank and the average divides, so
//                            each rank's is clipped at sqrt(N) thr_G, over all its parameters as in the paper
//                            (the code's helpers work tensor by tensor, and are off) (train/engine.h)
//   sampled selection        compress.select: dgc_sampled (compress/select/dgc_sampled.h), with
//                            compress.sample_ratio, .resample, .truncate; compress.scope: tensor selects in each
//                            tensor, as paper and code do
//   warm-up of the density   compress.warmup lists it, [0.25, 0.0625, 0.015625, 0.004] as in the paper; or
//                            compress.warmup_epochs E: density^((e + 1) / (E + 1)), as in the code. In epochs
//                            of density 1 the code does not compress; we send everything, and masking takes
//                            the momentum off
//   1-D tensors dense        compress.dense_1d (the code): plain all-reduce, with the optimizer's momentum
//   weight decay             optimizer.weight_decay: outside, with a momentum of its own, never compressed
//                            (the code; optim/sgd.cpp, GradientForm::has_momentum)
//   32-bit values, 16-bit    compress.codec and compress.values (the paper; the code sends 64-bit positions)
//   runs of zeros
//
// The code selects |v| >= t, the paper |v| > t; we follow the code.
#include "compress/sparse_compressor.h"

namespace topknot {
namespace {

const bool registered = [] {
  add_sparse("dgc",
             "Deep Gradient Compression: momentum before selection, a threshold from a sample, masking",
             {.select = "dgc_sampled", .memory = "dgc"});
  return true;
}();

}  // namespace
}  // namespace topknot

// The keys of how ranks talk, train and write; the rest of the table is in config_keys.cpp.

#include "dist/comm/communicator.h"
#include "dist/plan/merge_plan.h"
#include "dist/sparse/sparse_collective.h"
#include "train/config/config.h"
#include "train/config/key_rows.h"

namespace topknot {

using namespace key_rows;

std::vector<Key> machine_keys() {
  constexpr auto e = &Config::exchange;
  constexpr auto a = &Config::automatic;
  constexpr auto u = &Config::outer;
  constexpr auto d = &Config::dist;
  constexpr auto l = &Config::elastic;
  constexpr auto t = &Config::train;
  constexpr auto o = &Config::output;
  constexpr auto r = &Config::resume;
  using Dist = Config::Dist;
  using Train = Config::Train;
  return {
      text("auto.accuracy", at<a, &Config::Auto::accuracy>,
           "what compress.name=auto may choose. exact: dense, coded or not; safe: also topk at density 0.01; "
           "local_steps: these and local steps, whose learning rate is the run's own matter; aggressive: "
           "safe's "
           "and what loses accuracy or was not shown",
           {"exact", "safe", "local_steps", "aggressive"})
          .used_by({kAutoRuns}),

      text("exchange.merge", at<e, &Config::Exchange::merge>,
           "what is sent together (train --list merges); auto: buckets, so that groups are sent while the "
           "backward pass goes on",
           merge_forms()),
      number("exchange.groups", at<e, &Config::Exchange::groups>, 1, 1e9,
             "the plan itself: how many parameters each group has, in the order in which they are sent; a "
             "run that measures writes it to its config.yaml"),
      text("exchange.profile", at<e, &Config::Exchange::profile>,
           "exchange_profile.json of an earlier run, in place of measuring anew"),
      number("exchange.every", at<e, &Config::Exchange::every>, 0, 1e9,
             "local steps: each rank makes so many steps of its own, then the changes of the weights are "
             "exchanged and the outer optimizer applies their average; 0: gradients, in every step"),
      number("exchange.fragments", at<e, &Config::Exchange::fragments>, 1, 1e4,
             "parts of the model that are exchanged in turn, each once in exchange.every steps")
          .used_by({"exchange.every"}),
      number("exchange.overlap_steps", at<e, &Config::Exchange::overlap_steps>, 0, 1e9,
             "inner steps that go on while an exchange is under way; what it brings is applied behind them")
          .used_by({"exchange.every"}),
      text("exchange.collective", at<e, &Config::Exchange::collective>,
           "how selected entries become one sum (train --list collectives); auto: the quickest by measured "
           "times; coded_sum: for dense sums",
           with("auto", collectives().names())),
      number("exchange.ranks_per_host", at<e, &Config::Exchange::ranks_per_host>, 0, 1024,
             "neighbouring ranks that share a host: their gradients are summed dense, and what hosts send is "
             "compressed; with exchange.every a host makes its steps together; 0: no hierarchy"),
      text("exchange.hierarchy", at<e, &Config::Exchange::hierarchy>,
           "leader: each rank of a host encodes the whole sum, its first rank sends it; parts: each encodes "
           "and sends a part of every group, so that every network card works, and k counts in each part",
           {"leader", "parts"})
          .used_by({"exchange.ranks_per_host"}),

      text("exchange.outer.name", at<u, &Config::Outer::name>,
           "optimizer of the changes that ranks exchange: SGD with Nesterov's momentum, or as it is",
           {"nesterov", "sgd"})
          .used_by({"exchange.every"}),
      above("exchange.outer.lr", at<u, &Config::Outer::lr>, 0, 1e3,
            "its rate, which no schedule changes; 1 adds the change as it is")
          .used_by({"exchange.every"}),
      number("exchange.outer.momentum", at<u, &Config::Outer::momentum>, 0, 0.9999, "its momentum")
          .used_by({"exchange.every"}),
      number("exchange.outer.alpha", at<u, &Config::Outer::alpha>, 0, 1,
             "share of a rank's own weights that stays when it takes over those of all ranks")
          .used_by({"exchange.every"}),

      text("dist.backend", at<d, &Dist::backend>,
           "how ranks start and talk (train --list backends); auto: threads; under torchrun, mpirun or srun "
           "nccl where each rank has a GPU, else gloo",
           with("auto", backends().names())),
      number("dist.ranks", at<d, &Dist::ranks>, 1, 1024, "how many ranks train together"),
      text("dist.master", at<d, &Dist::master>,
           "processes on several hosts: HOST:PORT or [IPv6 address]:PORT where rank 0 listens")
          .on_host(),
      text("dist.interface", at<d, &Dist::interface>, "gloo, nccl: network interface to use, such as eth0")
          .on_host(),
      text("dist.nccl", at<d, &Dist::nccl>,
           "nccl: settings of NCCL, such as \"IB_HCA=mlx5_0 NET_GDR_LEVEL=PHB\": variables of the "
           "environment without NCCL_, which holds where it has them")
          .used_by({"nccl"})
          .of_start(),
      text("dist.token", at<d, &Dist::token>,
           "gloo, nccl: a word that only this job's processes have; others are refused at dist.master; "
           "written to no file")
          .hidden()
          .used_by({"gloo", "nccl"})
          .on_host(),
      flag("dist.ordered_sum", at<d, &Dist::ordered_sum>,
           "dense sums in rank order, the same bits on every backend; slower on large models"),
      number("dist.timeout_s", at<d, &Dist::timeout_s>, 0, 1e6,
             "seconds after which a silent rank ends the run, of the time in which the waiting rank itself "
             "runs; 0: never"),
      text("dist.link.rate", at<d, &Dist::link_rate>,
           "threads: emulate links of this rate between the ranks, such as 100mbit: results arrive when they "
           "would over such a network; 1gbit,50mbit@20 changes after 20 seconds; empty: as fast as memory"),
      text("dist.link.latency", at<d, &Dist::link_latency>,
           "of one message over the emulated link, such as 50us")
          .used_by({"dist.link.rate"}),

      number("elastic.min_ranks", at<l, &Config::Elastic::min_ranks>, 0, 1024,
             "processes on CPUs go on without those that die, while so many are left; 0: all end")
          .used_by({"gloo"})
          .of_start(),
      text("elastic.batch", at<l, &Config::Elastic::batch>,
           "what stays the same then: global, the samples of a step, shared by those that are left; or rank, "
           "data.batch_size on each, as always with local steps; rank_linear, rank_sqrt: and the learning "
           "rate "
           "is multiplied by the share of the ranks that are left (for SGD: Goyal et al. 2017) or its square "
           "root (for Adam)",
           {"global", "rank", "rank_linear", "rank_sqrt"})
          .used_by({"elastic.min_ranks"})
          .of_start(),
      number("elastic.respawns", at<l, &Config::Elastic::respawns>, 0, 1e6,
             "how many ranks that died are started again and join, in all")
          .used_by({"elastic.min_ranks"})
          .of_start(),

      number("train.epochs", at<t, &Train::epochs>, 0, 1e6,
             "passes over the training set; 0: until train.max_steps"),
      number("train.max_steps", at<t, &Train::max_steps>, 0, 1e12, "stop after so many steps; 0: no limit"),
      number("train.threads", at<t, &Train::threads>, 0, 1024,
             "compute threads per rank; 0: the cores that the affinity mask and the CPU quota leave, divided "
             "by the ranks of this machine, at most OMP_NUM_THREADS"),
      text("train.device", at<t, &Train::device>, "where to compute; auto: a GPU where there is one",
           {"auto", "cpu", "cuda"}),
      text("train.precision", at<t, &Train::precision>,
           "fp32; bf16: activations and products in bfloat16, weights, gradients and statistics in fp32; "
           "tf32: of products on a GPU",
           {"fp32", "tf32", "bf16"}),
      text("train.graphs", at<t, &Train::graphs>,
           "on a GPU: steps are recorded as CUDA graphs and replayed; the same numbers, less work for the "
           "host; parts: without NCCL's collectives",
           {"true", "false", "parts"})
          .used_by({kGpus}),
      text("train.unproven", at<t, &Train::unproven>,
           "on a GPU, what is not known to be faster on any card. early_launch: a kernel's blocks take their "
           "places while the kernel before it ends (compute capability 9.0 or more); the same numbers. "
           "conv_plans: under bf16 plans of cuDNN's graph API, which write weight gradients of convolutions "
           "in "
           "fp32, compete with its algorithms",
           {"none", "early_launch", "conv_plans", "both"})
          .used_by({kGpus}),
      text("train.trial", at<t, &Train::trial>,
           "on a GPU, for tests: KEY=NAME;...: trials whose key begins with KEY take the candidate NAME, "
           "untimed; --verbose shows both")
          .used_by({kGpus})
          .on_host(),
      flag("train.deterministic", at<t, &Train::deterministic>,
           "the same bits in every run on a GPU too, slower there; on a CPU always so")
          .used_by({kGpus}),
      text("train.algorithm_cache", at<t, &Train::algorithm_cache>,
           "folder where algorithms that a GPU's timing chose are kept for later runs; auto: "
           "~/.cache/topknot; none: not kept")
          .used_by({kGpus})
          .on_host(),
      text("train.bn_stats", at<t, &Train::bn_stats>,
           "batch-norm statistics for evaluation: means and variances averaged over ranks, rank 0's, or each "
           "rank its own",
           {"mean", "rank0", "local"}),
      number("train.accumulate", at<t, &Train::accumulate>, 1, 1e6,
             "batches that make one step; the last step of an epoch has those that are left"),
      number("train.clip_local", at<t, &Train::clip_local>, 0, 1e9,
             "greatest norm of a rank's gradient, before compression; 0: off"),
      text("train.clip_local_scope", at<t, &Train::clip_local_scope>,
           "clip_local measures the whole gradient (no overlap with backward) or each tensor",
           {"model", "tensor"})
          .used_by({"train.clip_local", "compress.clip"}),
      number("train.clip_global", at<t, &Train::clip_global>, 0, 1e9,
             "greatest norm of the averaged gradient; 0: off"),
      number("train.label_smoothing", at<t, &Train::label_smoothing>, 0, 0.99,
             "share of a training label that is spread evenly over all classes")
          .not_of({"speech", "synthetic_regression"}),
      number("train.eval_every", at<t, &Train::eval_every>, 0, 1e6,
             "epochs between evaluations, 0.25: four per epoch; 0: only at the end"),
      number("train.target_accuracy", at<t, &Train::target_accuracy>, 0, 1,
             "end the run at the first evaluation whose test accuracy is at least this; 0: none")
          .not_of({"synthetic_regression", "text", "tokens"}),
      number("train.peak_tflops", at<t, &Train::peak_tflops>, 0, 1e6,
             "the most TFLOP/s (1e12 a second) that a rank's device can do in train.precision: the end of "
             "the run then says what share of it the model's operations came to; 0: not known")
          .not_of({"speech"})
          .on_host(),
      number("train.checkpoint_every", at<t, &Train::checkpoint_every>, 0, 1e6,
             "epochs between checkpoints, 0.1: ten per epoch; there is one at each evaluation, stop and end "
             "in any case")
          .used_by({"train.checkpoint_keep"}),
      number("train.checkpoint_keep", at<t, &Train::checkpoint_keep>, 0, 1e6,
             "how many of the last checkpoints are kept, and the best besides; 0: none are written"),
      number("train.stop_after", at<t, &Train::stop_after>, 0, 1e12,
             "save and stop after so many steps of this start, as at a signal; 0: no limit")
          .of_start(),
      number("train.log_every", at<t, &Train::log_every>, 1, 1e9, "steps between lines of progress"),
      number("train.check_every", at<t, &Train::check_every>, 0, 1e9,
             "steps between checks that all ranks hold the same weights; 0: never"),
      number("train.max_skips", at<t, &Train::max_skips>, 1, 1e9,
             "stop after so many steps in a row that were not finite; more of them in all: the run fails at "
             "its end"),
      number("train.record_gradients", at<t, &Train::record_gradients>, 0, 1e9,
             "write rank 0's own gradients of so many steps to gradients.safetensors in the run directory; "
             "[200, 100]: of 200 steps after the first 100"),
      number("train.distribution_every", at<t, &Train::distribution_every>, 0, 1e9,
             "steps between looks at the distribution of rank 0's accumulated gradient; 0: none"),
      flag("train.step_times", at<t, &Train::step_times>,
           "measure the parts of steps with the GPU's clock, for metrics.jsonl and compare: of captured "
           "steps the first ten and every 50th")
          .used_by({kGpus}),
      number("train.profile_steps", at<t, &Train::profile_steps>, 0, 1e9,
             "write a Chrome trace of so many steps, a file per rank, to the run directory; [3, 100]: of 3 "
             "steps "
             "after the first 100, in place of 5; a run too short for it is traced at its end"),

      text("resume.residuals", at<r, &Config::Resume::residuals>,
           "train --resume: what becomes of the ranks' residuals; keep needs the same number of ranks, sum "
           "shares them out, reset drops them",
           {"keep", "sum", "reset"})
          .used_by({kResume})
          .of_start(),
      text("resume.data", at<r, &Config::Resume::data>,
           "train --resume: check refuses data other than those of the checkpoint, accept goes on with them",
           {"check", "accept"})
          .used_by({kResume})
          .of_start(),
      text("resume.method", at<r, &Config::Resume::method>,
           "train --resume, of a run that began with compress.name=auto: keep the checkpoint's method, for "
           "the same bits in every resume, or choose anew and follow the link",
           {"keep", "choose"})
          .used_by({kResume})
          .of_start(),

      text("output.dir", at<o, &Config::Output::dir>,
           "run directory; empty: a name made from the configuration, in runs/")
          .on_host(),
      flag("output.overwrite", at<o, &Config::Output::overwrite>, "replace an earlier run in the same folder")
          .on_host(),
      flag("output.tensorboard", at<o, &Config::Output::tensorboard>,
           "write an event file for TensorBoard into the run directory")
          .of_start(),
  };
}

}  // namespace topknot

#include <fmt/format.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "dist/comm/communicator.h"
#include "dist/comm/cuda/device_communicator.h"
#include "dist/comm/cuda/nccl_watch.h"
#include "nn/base/log.h"
#include "nn/base/program.h"
#include "nn/base/text.h"
#include "nn/core/cuda/context.h"
#include "nn/core/cuda/pool.h"

namespace topknot::cuda {
namespace {

constexpr std::size_t kGatherAndAdd = 8192;  // elements up to which one gather is quicker than two
constexpr double kEndSeconds = 10;           // for an orderly end

// "2.28.9" of 22809.
std::string nccl_version_text(int version) {
  const int major = version / (version < 10000 ? 1000 : 10000),
            rest = version - major * (version < 10000 ? 1000 : 10000);
  return fmt::format("{}.{}.{}", major, rest / 100, rest % 100);
}

// "call: what NCCL says of the result (its name); the last error NCCL noted".
std::string nccl_text(const std::string& call, ncclResult_t result, ncclComm_t communicator = nullptr) {
  std::string text = call + ": " + ncclGetErrorString(result);
  const char* last = ncclGetLastError(communicator);
  if (last && *last) text += std::string(" (") + last + ")";
  return text;
}

void check_one_rank_per_gpu(Communicator& host, int device) {
  const std::vector<std::string> places = gather_texts(host, gpu_place(device));
  std::map<std::string, std::size_t> seen;
  for (std::size_t r = 0; r < places.size(); ++r) {
    const std::string& text = places[r];
    const auto [first, is_new] = seen.emplace(text, r);
    if (is_new) continue;
    const auto gpu = text.find('\n') + 1, name = text.find('\n', gpu) + 1;
    host.barrier();  // the first to throw must not end the others' calls
    throw UserError(fmt::format(
        "dist.backend nccl: ranks {} and {} are on the same GPU ({} of {}), and NCCL takes one rank per GPU; "
        "start as many ranks per host as it has GPUs, or use dist.backend=threads for several ranks on one",
        first->second, r, text.substr(gpu, name - gpu - 1), text.substr(name)));
  }
}

// Runs the checks before NCCL's own start and returns rank 0's unique id. Collective. The same UserError on
// all if NCCL's versions differ, or ranks share a GPU without NCCL_HOSTID. `device`: this rank's.
ncclUniqueId unique_id_for(Communicator& host, int device) {
  int version = 0;
  if (const ncclResult_t result = ncclGetVersion(&version); result != ncclSuccess)
    throw CudaError(host.rank_name(host.rank()) + ": " + nccl_text("ncclGetVersion", result));
  check_same(host, "the version of NCCL (libnccl.so)", nccl_version_text(version));
  check_one_rank_per_gpu(host, device);
  ncclUniqueId id{};
  if (host.rank() == 0)
    if (const ncclResult_t result = ncclGetUniqueId(&id); result != ncclSuccess)
      throw CollectiveError(host.rank_name(0) + ": " + nccl_text("ncclGetUniqueId", result) +
                            "; is there a network interface that NCCL may use (NCCL_SOCKET_IFNAME)?");
  host.broadcast(std::as_writable_bytes(std::span(&id, 1)), 0);
  return id;
}

// GPU memory for as long as this lives, whatever stream uses it.
class Memory {
 public:
  explicit Memory(std::size_t bytes) : bytes_(bytes) { TOPKNOT_CUDA(cudaMalloc(&data_, bytes)); }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

class NcclCommunicator : public DeviceCommunicator {
 public:
  // `whole`: null, or what this is a split of.
  NcclCommunicator(Communicator& host, double timeout_s, NcclCommunicator* whole)
      : host_(host), timeout_s_(timeout_s), whole_(whole), exceptions_(std::uncaught_exceptions()) {
    start();
  }

  ~NcclCommunicator() override {
    const bool in_order = std::uncaught_exceptions() == exceptions_;
    const Deadline deadline = deadline_in(timeout_s_ > 0 ? std::min(timeout_s_, kEndSeconds) : kEndSeconds);
    const PollingWait wait;
    while (in_order && !ended() && watch_ && !watch_->idle() && Clock::now() < deadline) wait.pause();
    const bool idle = watch_ && watch_->idle();
    watch_.reset();
    if (communicator_ && in_order && idle) end(deadline);
    if (communicator_) ncclCommAbort(std::exchange(communicator_, nullptr));
    if (ending_.joinable()) ending_.join();
  }

  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  std::string backend() const override { return "nccl"; }
  bool capturable() const override { return capturable_; }

  // A failed call ends a communicator for good (non-blocking NCCL keeps the error), so all ranks start anew. None
  // has launched a graph before they agree: its kernels would wait for the others'.
  void try_graphs(bool wanted) override {
    if (size() == 1) return;
    if (!wanted) return static_cast<void>(capturable_ = false);
    const std::vector<std::string> problems = gather_texts(host_, recording_problem());
    const auto first =
        std::find_if(problems.begin(), problems.end(), [](const std::string& text) { return !text.empty(); });
    if (first == problems.end()) return start_watch();
    capturable_ = false;
    abandon(std::exchange(communicator_, nullptr));
    start();
    if (rank() == 0)
      log_warning(
          fmt::format("NCCL refuses its calls in a CUDA graph, on {}: {}; steps are recorded in two graphs "
                      "around the collectives (train.graphs=parts)",
                      host_.rank_name(static_cast<int>(first - problems.begin())), *first));
  }

  void all_gather(const std::byte* mine, std::byte* all, std::size_t bytes, cudaStream_t stream) override {
    begin("all_gather", bytes);
    gather(mine, all, bytes, stream);
    expect(stream);
  }

  void all_reduce(DType type, void* data, std::size_t n, SumOrder order, cudaStream_t stream) override {
    begin(type == DType::f32 ? "all_reduce" : "all_reduce of bfloat16", n * size_of(type));
    if (n > 0 && order == SumOrder::library)
      call("ncclAllReduce", [&](ncclComm_t c) {
        return ncclAllReduce(data, data, n, type == DType::f32 ? ncclFloat32 : ncclBfloat16, ncclSum, c,
                             stream);
      });
    else if (n > 0 && size() > 1)
      reduce_in_order(type, static_cast<std::byte*>(data), n, stream);
    expect(stream);
  }

  void all_gather_and_reduce(const std::byte* mine, std::byte* all, std::size_t bytes, float* data,
                             std::size_t n, cudaStream_t stream) override {
    begin("all_gather and all_reduce", bytes + n * sizeof(float));
    std::byte* const blocks = scratch(n * static_cast<std::size_t>(size()) * sizeof(float));
    in_one_launch("ncclAllGather, two of them", [&](ncclComm_t c, const auto& note) {
      note(ncclAllGather(mine, all, bytes, ncclUint8, c, stream));
      note(ncclAllGather(data, blocks, n, ncclFloat32, c, stream));
    });
    ordered_sum_of_blocks(stream, DType::f32, blocks, n, size(), data, n);
    expect(stream);
  }

  void broadcast(std::byte* data, std::size_t bytes, int root, cudaStream_t stream) override {
    TOPKNOT_CHECK(root >= 0 && root < size(), "broadcast from a rank that does not exist");
    begin("broadcast", bytes);
    if (bytes > 0)
      call("ncclBroadcast",
           [&](ncclComm_t c) { return ncclBroadcast(data, data, bytes, ncclUint8, root, c, stream); });
    expect(stream);
  }

  void reduce_scatter(float* data, std::size_t n, cudaStream_t stream) override {
    begin("reduce_scatter", n * sizeof(float));
    scatter_sums(DType::f32, reinterpret_cast<std::byte*>(data), n, stream);
    expect(stream);
  }

  void all_gather_slices(float* data, std::size_t n, cudaStream_t stream) override {
    begin("all_gather of slices", n * sizeof(float));
    const ElementRange mine = slice_of(n, size(), rank());
    in_one_launch("ncclSend and ncclRecv", [&](ncclComm_t c, const auto& note) {
      for (int r = 0; r < size(); ++r) {
        const ElementRange theirs = slice_of(n, size(), r);
        if (r == rank()) continue;
        if (mine.size() > 0) note(ncclSend(data + mine.begin, mine.size(), ncclFloat32, r, c, stream));
        if (theirs.size() > 0) note(ncclRecv(data + theirs.begin, theirs.size(), ncclFloat32, r, c, stream));
      }
    });
    expect(stream);
  }

  std::unique_ptr<DeviceCommunicator> split(Communicator& host) override {
    return std::make_unique<NcclCommunicator>(host, timeout_s_, this);
  }

  void wait(cudaStream_t stream) override {
    Patience patience(timeout_s_);
    std::uint64_t done = watch_->ended();
    const PollingWait wait;
    const std::string what = "waiting for the GPU" + (last_.empty() ? "" : ", last call " + last_);
    for (;;) {
      const cudaError_t status = cudaStreamQuery(stream);
      throw_if_ended(what);  // what aborted has ended the stream's work too
      if (status == cudaSuccess) return;
      if (status != cudaErrorNotReady) {
        abort(host_.rank_name(rank()) + ": " + what + ": " + cudaGetErrorString(status));
        check_cuda(status, "cudaStreamQuery", __FILE__, __LINE__);
      }
      cudaGetLastError();  // not ready is no error
      if (const std::string why = problem(); !why.empty()) fail(what + ": " + why);
      if (const std::uint64_t now = watch_->ended(); now != done) done = now, patience = Patience(timeout_s_);
      if (patience.over()) fail(late(what));
      wait.pause();
    }
  }

  void launched(cudaStream_t stream) override {
    throw_if_ended("starting a graph");
    watch_->expect("a graph with collectives over NCCL", stream);
  }

  void abort(const std::string& reason) noexcept override {
    try {
      ncclComm_t ended = nullptr;
      {
        const std::lock_guard lock(mutex_);
        if (reason_.empty()) reason_ = reason.empty() ? "this rank gave up" : reason;
        ended = std::exchange(communicator_, nullptr);
      }
      host_.abort(reason);
      if (ended) end_at_once(ended);
      // Work on the GPU goes on after collectives that were ended; who waits for it asks the whole.
      if (whole_) whole_->abort(reason);
    } catch (...) {
      // Out of memory: this process ends soon, and its connections with it.
    }
  }

 private:
  void start() {
    const ncclUniqueId id = unique_id_for(host_, Context::current().options().device);
    try {
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 0;
      start_text_ = "NCCL's start with " + std::to_string(size()) + " ranks";
      const ncclResult_t result = ncclCommInitRankConfig(&communicator_, size(), id, rank(), &config);
      settle(start_text_, "ncclCommInitRankConfig", result);
    } catch (const std::exception& error) {
      abort(error.what());
      if (ending_.joinable()) ending_.join();
      throw;
    }
    start_watch();
  }

  void start_watch() {
    watch_ = std::make_unique<NcclWatch>(
        Context::current().options().device, timeout_s_, [this] { return problem(); },
        [this] { return host_.peers_alive(); }, [this](const std::string& why) { abort(explain(why)); });
  }

  // Records a step's kinds of calls after they were made once, which connects the ranks. "", or what went wrong.
  // Ends the watch, to which a refused call would be the end of the run.
  std::string recording_problem() {
    Context& context = Context::current();
    constexpr std::size_t n = 2 * kGatherAndAdd;
    const auto bytes = n * sizeof(float);
    const DeviceArray<float> sum(n);
    const DeviceArray<std::byte> all(bytes * static_cast<std::size_t>(size()));
    TOPKNOT_CUDA(cudaMemsetAsync(sum.data(), 0, bytes, context.stream()));
    const auto calls = [&] {
      all_gather(reinterpret_cast<const std::byte*>(sum.data()), all.data(), bytes, context.stream());
      all_reduce(DType::f32, sum.data(), n, SumOrder::library, context.stream());
      all_reduce(DType::f32, sum.data(), n, SumOrder::ranks, context.stream());
    };
    calls(), wait(context.stream());
    watch_.reset();
    GraphMemory memory(context.pool());
    recording_ = true;
    std::string text;
    try {
      const Graph graph(context.stream(), memory, calls);
    } catch (const std::exception& error) {
      text = error.what();
    }
    recording_ = false;
    return text;
  }

  // ncclCommAbort ends what is on the GPU, and then waits until no graph holds calls of the communicator
  // (NCCL 2.26 and later). The graphs' owner may be the caller, or wait for him: so another thread does it.
  void end_at_once(ncclComm_t ended) {
    try {
      ending_ = std::thread([ended] { ncclCommAbort(ended); });
    } catch (const std::system_error&) {
      ncclCommAbort(ended);
    }
  }

  // Aborts a communicator whose calls a graph has refused, and waits for at most kEndSeconds: NCCL may wait
  // for ever for a graph that never held the calls.
  void abandon(ncclComm_t refused) {
    const auto ended = std::make_shared<std::atomic<bool>>(false);
    std::thread([refused, ended] {
      ncclCommAbort(refused);
      *ended = true;
    }).detach();
    const Deadline deadline = deadline_in(kEndSeconds);
    const PollingWait wait;
    while (!*ended && Clock::now() < deadline) wait.pause();
  }

  void begin(const char* operation, std::size_t bytes) {
    last_ = std::string(operation) + " #" + std::to_string(++sequence_) + " of " + std::to_string(bytes) +
            " bytes over NCCL";
    throw_if_ended(last_);
  }

  // The mutex keeps the communicator alive during a (short) call: another thread may abort at any time.
  void call(const char* name, const auto& body) {
    ncclResult_t result;
    {
      const std::lock_guard lock(mutex_);
      result = communicator_ ? body(communicator_) : ncclSuccess;
    }
    throw_if_ended(last_);
    settle(last_, name, result);
  }

  // A group of calls: `body` gets the communicator, and notes the calls' results. It is closed also after a failure.
  void in_one_launch(const char* name, const auto& body) {
    call(name, [&](ncclComm_t c) {
      ncclResult_t first = ncclGroupStart();
      if (first != ncclSuccess) return first;
      const auto note = [&](ncclResult_t result) {
        if ((first == ncclSuccess || first == ncclInProgress) && result != ncclSuccess) first = result;
      };
      body(c, note);
      note(ncclGroupEnd());
      return first;
    });
  }

  // Until NCCL has put the call on its stream.
  void settle(const std::string& what, const char* name, ncclResult_t result) {
    Patience patience(timeout_s_);
    const PollingWait wait;
    StopGracePeriod after_signal;
    for (Clock::time_point look = Clock::now();;) {
      if (result == ncclInProgress) {
        const std::lock_guard lock(mutex_);
        if (communicator_) {
          const ncclResult_t asked = ncclCommGetAsyncError(communicator_, &result);
          if (asked != ncclSuccess) result = asked;
        }
      }
      throw_if_ended(what);
      if (result == ncclSuccess) return;
      if (result != ncclInProgress && recording_) throw CollectiveError(describe(name, result));
      if (result != ncclInProgress) fail(what + ": " + describe(name, result), result);
      if (Clock::now() >= look) {  // which takes a lock that the host's collectives use
        if (!host_.first_error().empty()) fail(what + " was ended");
        if (after_signal.ended(0, stop_signal() == 0 || host_.peers_alive()))
          fail(what + " stopped by " + signal_name(stop_signal()) + " while waiting for the peers");
        look = Clock::now() + std::chrono::milliseconds(20);
      }
      if (patience.over()) fail(late(what));
      wait.pause();
    }
  }

  std::string describe(const char* name, ncclResult_t result) {
    const std::lock_guard lock(mutex_);
    return nccl_text(name, result, communicator_);
  }

  // "" or why nothing will end any more.
  std::string problem() {
    {
      const std::lock_guard lock(mutex_);
      if (!communicator_) return "";
      ncclResult_t state = ncclSuccess;
      const ncclResult_t asked = ncclCommGetAsyncError(communicator_, &state);
      if (asked != ncclSuccess) state = asked;
      if (state != ncclSuccess && state != ncclInProgress) return nccl_text("NCCL", state, communicator_);
    }
    return host_.first_error().empty() ? "" : "a peer has ended";
  }

  std::string late(const std::string& what) const {
    return what + " gave up after dist.timeout_s (" + short_text(timeout_s_) +
           " s): a peer did not come; NCCL_DEBUG=INFO shows whom NCCL talks to";
  }

  // With the first error of the run, which the host's group knows at once or soon.
  std::string explain(const std::string& what) {
    const std::string text = host_.rank_name(rank()) + ": " + what;
    std::string first;
    for (const Deadline deadline = deadline_in(0.5); first.empty() && Clock::now() < deadline;) {
      first = host_.first_error();
      if (first.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return first.empty() || first == text ? text : text + "\nfirst error: " + first;
  }

  [[noreturn]] void fail(const std::string& what, ncclResult_t result = ncclRemoteError) {
    const std::string text = explain(what);
    abort(text);
    if (result == ncclUnhandledCudaError) throw CudaError(text);
    throw_error(text);
  }

  void throw_if_ended(const std::string& what) {
    const std::lock_guard lock(mutex_);
    if (reason_.empty()) return;
    const std::string me = host_.rank_name(rank()) + ": ";
    throw_error(reason_.rfind(me, 0) == 0 ? reason_ : me + what + " was ended\nfirst error: " + reason_);
  }

  // After a stop signal, every failure counts as an interruption.
  [[noreturn]] static void throw_error(const std::string& text) {
    if (stop_signal() != 0) throw Interrupted(text);
    throw CollectiveError(text);
  }

  void expect(cudaStream_t stream) {
    if (!capturing(stream)) watch_->expect(last_, stream);
  }

  void gather(const void* mine, std::byte* all, std::size_t bytes, cudaStream_t stream) {
    if (bytes > 0)
      call("ncclAllGather",
           [&](ncclComm_t c) { return ncclAllGather(mine, all, bytes, ncclUint8, c, stream); });
  }

  void reduce_in_order(DType type, std::byte* data, std::size_t n, cudaStream_t stream) {
    const auto ranks = static_cast<std::size_t>(size());
    const std::size_t element = size_of(type);
    // Every rank's slice, and what is left: less than 16 * ranks elements, or a short array.
    const std::size_t slice = n <= kGatherAndAdd ? 0 : n / (16 * ranks) * 16;
    const std::size_t split = slice * ranks, rest = n - split;
    if (slice > 0) {
      scatter_sums(type, data, split, stream);
      const std::size_t bytes = slice * element;
      gather(data + static_cast<std::size_t>(rank()) * bytes, data, bytes, stream);
    }
    if (rest > 0) {
      std::byte* const blocks = scratch(rest * ranks * element);
      gather(data + split * element, blocks, rest * element, stream);
      ordered_sum_of_blocks(stream, type, blocks, rest, size(), data + split * element, rest);
    }
  }

  // Rank r's slice_of() goes to rank r, which adds those of all ranks in rank order.
  void scatter_sums(DType type, std::byte* data, std::size_t n, cudaStream_t stream) {
    const std::size_t element = size_of(type);
    const ElementRange mine = slice_of(n, size(), rank());
    const std::size_t bytes = mine.size() * element;
    std::byte* const blocks = scratch(bytes * static_cast<std::size_t>(size()));
    in_one_launch("ncclSend and ncclRecv", [&](ncclComm_t c, const auto& note) {
      for (int r = 0; r < size(); ++r) {
        const ElementRange theirs = slice_of(n, size(), r);
        if (theirs.size() > 0)
          note(ncclSend(data + theirs.begin * element, theirs.size() * element, ncclUint8, r, c, stream));
        if (bytes > 0)
          note(ncclRecv(blocks + static_cast<std::size_t>(r) * bytes, bytes, ncclUint8, r, c, stream));
      }
    });
    ordered_sum_of_blocks(stream, type, blocks, mine.size(), size(), data + mine.begin * element,
                          mine.size());
  }

  std::byte* scratch(std::size_t bytes) {
    if (bytes == 0) return nullptr;
    // Smaller ones stay: a graph, or work on its way, may use them.
    if (scratch_.empty() || scratch_.back()->bytes() < bytes)
      scratch_.push_back(
          std::make_unique<Memory>(std::max(bytes, scratch_.empty() ? 0 : 2 * scratch_.back()->bytes())));
    return scratch_.back()->data();
  }

  bool ended() {
    const std::lock_guard lock(mutex_);
    return !reason_.empty();
  }

  // Lets NCCL end in order, which takes all ranks. The watch has gone: no other thread calls NCCL.
  void end(Deadline deadline) {
    const PollingWait wait;
    ncclResult_t state = ncclCommFinalize(communicator_);
    while (state == ncclInProgress && Clock::now() < deadline && host_.first_error().empty()) {
      wait.pause();
      if (ncclCommGetAsyncError(communicator_, &state) != ncclSuccess) return;
    }
    if (state == ncclSuccess) ncclCommDestroy(std::exchange(communicator_, nullptr));
  }

  Communicator& host_;
  const double timeout_s_;
  NcclCommunicator* const whole_;
  const int exceptions_;  // in flight at construction
  std::string start_text_, last_;
  std::uint64_t sequence_ = 0;
  bool capturable_ = true;
  bool recording_ = false;  // in try_graphs(): a failed call is not the end
  std::vector<std::unique_ptr<Memory>> scratch_;
  std::mutex mutex_;  // guards what follows
  ncclComm_t communicator_ = nullptr;
  std::string reason_;
  std::thread ending_;  // of the thread that took the communicator in abort()
  std::unique_ptr<NcclWatch> watch_;
};

}  // namespace

std::unique_ptr<DeviceCommunicator> make_nccl_communicator(Communicator& host, double timeout_s) {
  return std::make_unique<NcclCommunicator>(host, timeout_s, nullptr);
}

std::unique_ptr<DeviceCommunicator> make_device_communicator(Communicator& host, double timeout_s) {
  return host.backend() == "threads" ? make_device_threads(host, timeout_s)
                                     : make_nccl_communicator(host, timeout_s);
}

}  // namespace topknot::cuda

// NCCL on the machine of machine.h, among threads of one process. A collective takes place when every rank's
// stream has come to it; until then a stream stands still, and nobody holds the machine's lock.
#include <nccl.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "nn/core/bfloat16.h"
#include "tests/emulator/machine_state.h"
#include "tests/emulator/nccl_emulator.h"

namespace topknot::emulator {
namespace {

struct Message {
  int peer;
  void* data;
  std::size_t bytes;
};

// What a rank brings to a collective of a launch.
struct Part {
  enum Kind { gather, sum, broadcast, messages } kind = messages;
  const void* from = nullptr;
  void* to = nullptr;
  std::size_t count = 0;
  ncclDataType_t type = ncclUint8;
  int root = -1;
  std::vector<Message> sends, receives;
  std::vector<std::vector<char>> read;  // what it has taken of the rank's memory
};

// Several collectives in a launch come from a group.
struct Launch {
  std::vector<std::vector<Part>> parts;  // by rank; empty until it comes
  int arrived = 0, left = 0;
};

struct Group {
  std::mutex mutex;
  int ranks = 0, joined = 0;
  std::map<std::uint64_t, Launch> launches;
};

// A rank's; work on streams may outlive the communicator.
struct Member {
  std::shared_ptr<Group> group;
  int rank = 0, device = 0;
  std::uint64_t next = 0;
  bool aborted = false;
  ncclResult_t error = ncclSuccess;                          // of a call: what every later one returns
  std::shared_ptr<int> in_graphs = std::make_shared<int>();  // shared by calls that were captured
};

[[noreturn]] void broken(const char* what) {
  std::fprintf(stderr, "emulated NCCL: %s\n", what);
  std::abort();  // NCCL would hang or mix up data
}

std::size_t size_of(ncclDataType_t type) {
  return type == ncclUint8 ? 1 : type == ncclBfloat16 ? 2 : type == ncclFloat32 ? 4 : 8;
}

// From the last rank down: a library's order is not the ranks'.
template <class T, class Add>
void sum(const std::vector<Part>& parts, const Add& add) {
  std::vector<T> total(parts[0].count);
  for (std::size_t i = 0; i < total.size(); ++i) {
    total[i] = static_cast<const T*>(parts.back().from)[i];
    for (std::size_t r = parts.size() - 1; r-- > 0;)
      total[i] = add(total[i], static_cast<const T*>(parts[r].from)[i]);
  }
  for (const Part& part : parts) std::memcpy(part.to, total.data(), total.size() * sizeof(T));
}

void exchange_messages(const std::vector<Part>& parts) {
  const auto find = [](const std::vector<Message>& messages, int peer, int index) -> const Message* {
    for (const Message& message : messages)
      if (message.peer == peer && index-- == 0) return &message;
    return nullptr;
  };
  const int ranks = int(parts.size());
  for (int a = 0; a < ranks; ++a)
    for (int b = 0; b < ranks; ++b)
      for (int i = 0;; ++i) {
        const Message* out = find(parts[a].sends, b, i);
        const Message* in = find(parts[b].receives, a, i);
        if (!out && !in) break;
        if (!out || !in || out->bytes != in->bytes) broken("sends and receives do not match");
        std::memmove(in->data, out->data, out->bytes);
      }
}

// From now until the collective has taken place it may read the rank's memory and write its results at any
// time. These are NaNs meanwhile. It reads as late as it may, or, on a reversed machine, now.
void arrive(Part& part, int rank, int ranks) {
  const std::size_t bytes = part.count * size_of(part.type);
  std::vector<std::pair<const void**, std::size_t>> sources;
  if (part.from && (part.kind != Part::broadcast || part.root == rank))
    sources.push_back({&part.from, bytes});
  for (Message& send : part.sends) sources.push_back({const_cast<const void**>(&send.data), send.bytes});
  for (const auto& [data, n] : sources) {
    const auto* const first = static_cast<const char*>(*data);
    part.read.emplace_back(first, first + n);
  }
  if (part.to) std::memset(part.to, 0xFF, part.kind == Part::gather ? std::size_t(ranks) * bytes : bytes);
  for (const Message& receive : part.receives) std::memset(receive.data, 0xFF, receive.bytes);
  for (std::size_t i = 0; i < sources.size(); ++i)  // which may lie in the results
    if (machine().reverse)
      *sources[i].first = part.read[i].data();
    else if (sources[i].second > 0)
      std::memcpy(const_cast<void*>(*sources[i].first), part.read[i].data(), sources[i].second);
}

void perform(const std::vector<Part>& parts) {
  for (const Part& part : parts)
    if (part.kind != parts[0].kind || part.count != parts[0].count || part.type != parts[0].type ||
        part.root != parts[0].root)
      broken("the ranks do not make the same calls");
  const std::size_t bytes = parts[0].count * size_of(parts[0].type);
  switch (parts[0].kind) {
    case Part::gather:
      for (const Part& receiver : parts)
        for (std::size_t r = 0; r < parts.size(); ++r)
          std::memmove(static_cast<char*>(receiver.to) + r * bytes, parts[r].from, bytes);
      return;
    case Part::sum:
      if (parts[0].type == ncclFloat32) return sum<float>(parts, [](float a, float b) { return a + b; });
      return sum<BFloat16>(parts,
                           [](BFloat16 a, BFloat16 b) { return to_bfloat16(to_float(a) + to_float(b)); });
    case Part::broadcast:
      for (const Part& receiver : parts)
        std::memmove(receiver.to, parts[std::size_t(parts[0].root)].from, bytes);
      return;
    case Part::messages:
      return exchange_messages(parts);
  }
}

void perform(const Launch& launch) {
  for (std::size_t i = 0; i < launch.parts[0].size(); ++i) {
    std::vector<Part> parts;
    for (const std::vector<Part>& of_rank : launch.parts) {
      if (of_rank.size() != launch.parts[0].size()) broken("the ranks' groups differ");
      parts.push_back(of_rank[i]);
    }
    perform(parts);
  }
}

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Group>> groups;  // by unique id
  int ids = 0;
};
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

std::atomic<int> aborts = 0, communicators = 0;
thread_local int version = NCCL_VERSION_CODE;

// Between ncclGroupStart and ncclGroupEnd.
struct Open {
  bool is_open = false;
  std::shared_ptr<Member> state;
  std::vector<Part> parts;
  cudaStream_t stream = nullptr;
};
thread_local Open open_group;

ncclResult_t launch(const std::shared_ptr<Member>& state, std::vector<Part> parts, cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &capture);
  if (capture != cudaStreamCaptureStatusNone && state->error == ncclSuccess)
    state->error = static_cast<ncclResult_t>(
        injected(("NCCL in a graph of rank " + std::to_string(state->rank)).c_str()));
  if (state->error != ncclSuccess) return state->error;
  const auto held = capture == cudaStreamCaptureStatusNone ? nullptr : state->in_graphs;
  enqueue_when(stream,
               [state, held, parts = std::move(parts), number = std::optional<std::uint64_t>()]() mutable {
                 Group& group = *state->group;
                 const std::lock_guard lock(group.mutex);
                 const auto leave = [&] { return number.reset(), true; };
                 if (state->aborted) {
                   if (number) --group.launches[*number].arrived;  // it will never take place
                   return leave();
                 }
                 if (!number) {
                   number = state->next++;
                   Launch& mine = group.launches[*number];
                   mine.parts.resize(std::size_t(group.ranks));
                   std::vector<Part>& brought = mine.parts[std::size_t(state->rank)];
                   brought = parts;
                   for (Part& part : brought) arrive(part, state->rank, group.ranks);
                   if (++mine.arrived == group.ranks) perform(mine);
                 }
                 Launch& mine = group.launches[*number];
                 if (mine.arrived < group.ranks) return false;
                 if (++mine.left == group.ranks) group.launches.erase(*number);
                 return leave();
               });
  return ncclInProgress;
}

// At once, or when the group ends.
ncclResult_t put(const std::shared_ptr<Member>& state, Part part, cudaStream_t stream) {
  if (!open_group.is_open) return launch(state, {std::move(part)}, stream);
  if (open_group.state && (open_group.state != state || open_group.stream != stream))
    broken("a group of several communicators or streams is not emulated");
  open_group.state = state, open_group.stream = stream;
  auto& parts = open_group.parts;
  // A group's messages are one exchange.
  if (part.kind == Part::messages && !parts.empty() && parts.back().kind == Part::messages) {
    parts.back().sends.insert(parts.back().sends.end(), part.sends.begin(), part.sends.end());
    parts.back().receives.insert(parts.back().receives.end(), part.receives.begin(), part.receives.end());
  } else {
    parts.push_back(std::move(part));
  }
  return ncclSuccess;
}

// As NCCL since 2.26: a communicator does not end while a graph holds its calls. What is on the device's
// streams goes on meanwhile, as a GPU's would.
void wait_for_graphs(const Member& comm) {
  const auto deadline = Clock::now() + std::chrono::seconds(20);
  while (comm.in_graphs.use_count() > 1) {
    if (Clock::now() > deadline)
      broken("a communicator is to end whose calls a graph holds: NCCL would hang");
    {
      const std::lock_guard lock(state().mutex);
      for (const auto& [key, stream] : std::map(state().streams))
        if (stream->device == comm.device) run_until(stream, stream->enqueued);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

void set_nccl_version(int value) {
  version = value;
}
int nccl_aborts() {
  return aborts;
}
int nccl_communicators() {
  return communicators;
}

}  // namespace topknot::emulator

using namespace topknot::emulator;

struct ncclComm {
  std::shared_ptr<Member> state;
};

#define TOPKNOT_STAND_IN_NCCL(name) \
  if (const int error = injected(#name)) return static_cast<ncclResult_t>(error)

extern "C" {

ncclResult_t ncclGetVersion(int* value) {
  TOPKNOT_STAND_IN_NCCL(ncclGetVersion);
  return *value = version, ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess              ? "no error"
         : result == ncclUnhandledCudaError ? "unhandled cuda error"
         : result == ncclSystemError        ? "unhandled system error"
         : result == ncclRemoteError        ? "remote process exited or there was a network error"
         : result == ncclInProgress         ? "NCCL operation in progress"
                                            : "another error";
}
const char* ncclGetLastError(ncclComm_t) {
  return "";
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  TOPKNOT_STAND_IN_NCCL(ncclGetUniqueId);
  const std::lock_guard lock(registry().mutex);
  std::memset(id, 0, sizeof *id);
  std::snprintf(id->internal, sizeof id->internal, "group %d", ++registry().ids);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  TOPKNOT_STAND_IN_NCCL(ncclCommInitRankConfig);
  if (!config || config->blocking != 0) return ncclInvalidUsage;
  std::shared_ptr<Group> group;
  {
    const std::lock_guard lock(registry().mutex);
    auto& known = registry().groups[id.internal];
    if (!known) known = std::make_shared<Group>();
    group = known;
  }
  const std::lock_guard lock(group->mutex);
  group->ranks = ranks;
  ++group->joined;
  auto state = std::make_shared<Member>();
  state->group = group, state->rank = rank, state->device = this_thread().device;
  *made = new ncclComm{state};
  ++communicators;
  return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  *error = ncclSuccess;
  if (const int code = injected("ncclCommGetAsyncError"))
    return *error = static_cast<ncclResult_t>(code), ncclSuccess;
  if (comm->state->error != ncclSuccess) return *error = comm->state->error, ncclSuccess;
  const std::lock_guard lock(comm->state->group->mutex);
  if (comm->state->group->joined < comm->state->group->ranks) *error = ncclInProgress;
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) {
  return ncclInProgress;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  wait_for_graphs(*comm->state);
  --communicators;
  return delete comm, ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  ++aborts;
  {
    const std::lock_guard lock(comm->state->group->mutex);
    comm->state->aborted = true;
  }
  wait_for_graphs(*comm->state);
  --communicators;
  return delete comm, ncclSuccess;
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  TOPKNOT_STAND_IN_NCCL(ncclAllGather);
  return put(comm->state, {Part::gather, from, to, count, type, -1, {}, {}, {}}, stream);
}
ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t,
                           ncclComm_t comm, cudaStream_t stream) {
  TOPKNOT_STAND_IN_NCCL(ncclAllReduce);
  return put(comm->state, {Part::sum, from, to, count, type, -1, {}, {}, {}}, stream);
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  TOPKNOT_STAND_IN_NCCL(ncclBroadcast);
  return put(comm->state, {Part::broadcast, from, to, count, type, root, {}, {}, {}}, stream);
}

ncclResult_t ncclGroupStart() {
  TOPKNOT_STAND_IN_NCCL(ncclGroupStart);
  open_group = {};
  open_group.is_open = true;
  return ncclSuccess;
}
ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  TOPKNOT_STAND_IN_NCCL(ncclSend);
  if (!open_group.is_open) return ncclInvalidUsage;
  Part part;
  part.sends.push_back({peer, const_cast<void*>(data), count * size_of(type)});
  return put(comm->state, std::move(part), stream);
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  TOPKNOT_STAND_IN_NCCL(ncclRecv);
  if (!open_group.is_open) return ncclInvalidUsage;
  Part part;
  part.receives.push_back({peer, data, count * size_of(type)});
  return put(comm->state, std::move(part), stream);
}
ncclResult_t ncclGroupEnd() {
  TOPKNOT_STAND_IN_NCCL(ncclGroupEnd);
  const Open group = std::exchange(open_group, {});
  if (!group.state) return ncclSuccess;
  return launch(group.state, group.parts, group.stream);
}

}  // extern "C"

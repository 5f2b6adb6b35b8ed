// The threads of a block as fibres of one thread of the operating system. A thread runs until it waits for
// its warp or its block; when none can run, whoever waits for a full warp or block goes on. A thread that
// ends leaves its stack to the next that has not begun, so that kernels without barriers need but one.
#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include <ucontext.h>

#include "tests/emulator/machine.h"
#include "tests/emulator/races.h"

namespace topknot::emulator {
namespace {

constexpr std::size_t kStack = 128 << 10;

enum class Wait { to_begin, nothing, warp, block, finished };

struct Fibre {
  std::unique_ptr<char[]> stack{new char[kStack]};
  ucontext_t entry{};
  jmp_buf at;
  bool started = false;
};

struct Thread {
  Fibre* fibre = nullptr;
  Wait wait = Wait::finished;
  unsigned mask = 0;
  bool orders = false;   // it waits in __syncwarp
  bool awaited = false;  // it has called await_previous()
  unsigned barrier = 0;  // the line it stands at
  int predicate = 0, any = 0;
  std::uint64_t word = 0;
  std::uint64_t seen[32];  // what the warp brought
};

struct Block {
  std::vector<std::unique_ptr<Fibre>> fibres;
  std::vector<Fibre*> free;
  std::vector<Thread> threads;
  Place place;
  int current = 0;  // the thread that runs
  int turn = 0;     // threads that this round has passed
  bool reverse = false;
  const std::function<void()>* body = nullptr;
  jmp_buf scheduler;
};

thread_local Block block;

[[noreturn]] void broken(const char* what) {
  // A kernel that would hang or be undefined on a GPU; there is no way on from inside it.
  std::fprintf(stderr, "emulated GPU: %s (block %u, %zu threads)\n", what, block.place.block.x,
               block.threads.size());
  std::abort();
}

void pause(Fibre& me) {
  if (_setjmp(me.at) == 0) _longjmp(block.scheduler, 1);
}

// The thread whose turn it is.
int take_turn() {
  const int threads = int(block.threads.size()), turn = block.turn++;
  return block.reverse ? threads - 1 - turn : turn;
}
bool turns_left() {
  return block.turn < int(block.threads.size());
}

void become(int index) {
  const auto at = unsigned(index);
  const dim3& size = block.place.block_size;
  block.current = index;
  block.place.thread = {at % size.x, at / size.x % size.y, at / size.x / size.y};
  races::run_thread(index, block.threads[index].fibre->stack.get(), kStack);
}

void main_of_fibre() {
  for (;;) {
    Fibre& me = *block.threads[block.current].fibre;
    (*block.body)();
    block.threads[block.current].wait = Wait::finished;
    if (turns_left()) {
      const int next = take_turn();
      Thread& thread = block.threads[next];
      if (thread.wait == Wait::to_begin) {
        thread.fibre = &me;
        thread.wait = Wait::nothing;
        become(next);
        continue;
      }
      --block.turn;
    }
    block.free.push_back(&me);
    pause(me);
  }
}

Fibre& idle_fibre() {
  if (block.free.empty()) {
    block.fibres.push_back(std::make_unique<Fibre>());
    return *block.fibres.back();
  }
  Fibre& fibre = *block.free.back();
  block.free.pop_back();
  return fibre;
}

void resume(int index) {
  Thread& thread = block.threads[index];
  if (thread.wait == Wait::to_begin) {
    thread.fibre = &idle_fibre();
    thread.wait = Wait::nothing;
  }
  become(index);
  Fibre& fibre = *thread.fibre;
  if (_setjmp(block.scheduler) != 0) return;
  if (fibre.started) _longjmp(fibre.at, 1);
  fibre.started = true;
  getcontext(&fibre.entry);
  fibre.entry.uc_stack.ss_sp = fibre.stack.get();
  fibre.entry.uc_stack.ss_size = kStack;
  fibre.entry.uc_link = nullptr;
  makecontext(&fibre.entry, main_of_fibre, 0);
  setcontext(&fibre.entry);
}

// The threads of a warp that this mask names and the block has all wait with it.
bool complete(const Thread* warp, int lanes, unsigned mask, bool orders) {
  bool all = true;
  for (int l = 0; l < lanes; ++l) {
    if (!(mask >> l & 1)) continue;
    if (warp[l].wait == Wait::finished) broken("a lane of the mask has ended");
    all = all && warp[l].wait == Wait::warp && warp[l].mask == mask;
    if (all && warp[l].orders != orders) broken("some lanes of a mask are in __syncwarp, others are not");
  }
  return all;
}

// Lets the lanes go on whose whole mask waits. True where there were any.
bool release_warps() {
  bool released = false;
  const int threads = int(block.threads.size());
  for (int first = 0; first < threads; first += 32) {
    Thread* const warp = &block.threads[first];
    const int lanes = std::min(32, threads - first);
    for (int l = 0; l < lanes; ++l) {
      if (warp[l].wait != Wait::warp) continue;
      const unsigned mask = warp[l].mask;
      if (!(mask >> l & 1)) broken("a lane waits with a mask that leaves it out");
      if (!complete(warp, lanes, mask, warp[l].orders)) continue;
      if (warp[l].orders)
        races::pass_warp_barrier(first / 32, lanes < 32 ? mask & ((1u << lanes) - 1) : mask);
      std::uint64_t words[32] = {};
      for (int from = 0; from < lanes; ++from)
        if (mask >> from & 1) words[from] = warp[from].word;
      for (int to = 0; to < lanes; ++to) {
        if (!(mask >> to & 1)) continue;
        std::memcpy(warp[to].seen, words, sizeof words);
        warp[to].wait = Wait::nothing;
      }
      released = true;
    }
  }
  return released;
}

void run_threads() {
  for (Thread& thread : block.threads) thread.wait = Wait::to_begin, thread.awaited = false;
  for (;;) {
    bool ran = false;
    for (block.turn = 0; turns_left();) {
      const int index = take_turn();
      const Wait wait = block.threads[index].wait;
      if (wait != Wait::nothing && wait != Wait::to_begin) continue;
      resume(index);
      ran = true;
    }
    if (ran) continue;
    if (release_warps()) continue;
    int waiting = 0, any = 0;
    unsigned barrier = 0;
    for (const Thread& thread : block.threads) {
      if (thread.wait == Wait::warp) broken("lanes of a warp wait for others that wait for the block");
      if (thread.wait != Wait::block) continue;
      if (waiting++ > 0 && thread.barrier != barrier) broken("threads wait at different barriers");
      barrier = thread.barrier;
      any |= thread.predicate;
    }
    if (waiting == 0) return;
    if (waiting < int(block.threads.size()))
      broken("a thread has ended without the barrier that others wait at");
    for (Thread& thread : block.threads)
      if (thread.wait == Wait::block) thread.wait = Wait::nothing, thread.any = any;
    races::pass_barrier();
  }
}

}  // namespace

const Place& place() {
  return block.place;
}

int lane() {
  return block.current % 32;
}

void await_previous() {
  block.threads[block.current].awaited = true;
}

bool has_awaited() {
  return block.threads[block.current].awaited;
}

int block_barrier(int predicate, unsigned line) {
  Thread& me = block.threads[block.current];
  me.barrier = line;
  me.predicate = predicate != 0;
  me.wait = Wait::block;
  give_way(64);
  pause(*me.fibre);
  return me.any;
}

const std::uint64_t* warp_exchange(unsigned mask, std::uint64_t mine, bool orders) {
  Thread& me = block.threads[block.current];
  me.mask = mask;
  me.orders = orders;
  me.word = mine;
  me.wait = Wait::warp;
  pause(*me.fibre);
  return me.seen;
}

void thread_fence() {
  races::fence();
  give_way(2);
}

void run_block(dim3 grid, dim3 size, std::uint64_t number, bool reverse, const std::function<void()>& body) {
  block.threads.resize(std::size_t{size.x} * size.y * size.z);
  block.reverse = reverse;
  block.body = &body;
  block.place.block_size = size;
  block.place.grid_size = grid;
  block.place.block = {unsigned(number % grid.x), unsigned(number / grid.x % grid.y),
                       unsigned(number / grid.x / grid.y)};
  races::begin_block(std::uint32_t(number), block.threads.size());
  run_threads();
  races::end_block();
}

}  // namespace topknot::emulator

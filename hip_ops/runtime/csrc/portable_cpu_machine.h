// SPDX-License-Identifier: Apache-2.0
// Runs a grid on the CPU: one block after the other, a fiber per thread, each until its next collective. HO_CPU_SCHEDULE, read at every
// launch, sets the order:
//   forward          lowest wave and lane first: a wave runs to its barrier before the next one starts (default)
//   reverse          the opposite order, also of blocks
//   random:<seed>    a random wave after each collective, its lanes and the blocks in random order
// A kernel that lacks a barrier gives different results under some of them. A collective that some threads do not reach, or reach at
// different places, aborts with block, thread and place. Launches of several OS threads run one after the other.
#pragma once

#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

#include "portable_cpu_fiber.h"

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace ho_cpu {

constexpr int kLanes = 64;
constexpr unsigned kMaxThreads = 1024;

struct Site {
  const char* what = "";
  const char* file = "";
  int line = 0;
  bool operator==(const Site& other) const {
    return line == other.line && same(what, other.what) && same(file, other.file);
  }
  static bool same(const char* a, const char* b) {
    return a == b || std::strcmp(a, b) == 0;
  }
};

enum class State { kReady, kInWave, kInBlock, kDone };

struct Fiber {
  FiberStack stack;
  dim3 thread{0, 0, 0};
  State state = State::kReady;
  Site site;
};

// Two sets of slots alternate, because a lane is at most one collective ahead of the slowest reader.
struct Wave {
  alignas(16) unsigned char slots[2][2][kLanes][16];
  unsigned turn = 0;
};

enum class Order { kForward, kReverse, kRandom };

struct Machine {
  std::mutex mutex;
  dim3 grid, block, index;
  uint64_t block_number = 0;  // counts over all launches; HO_LDS detects a new block by it
  std::vector<Fiber> fibers = std::vector<Fiber>(kMaxThreads);  // a stack is allocated when a launch first needs it
  std::vector<Wave> waves;
  Fiber* current = nullptr;
  SchedulerStack scheduler;
  void (*body)(void*) = nullptr;
  void* arguments = nullptr;
  Order order = Order::kForward;
  uint64_t random = 0;

  unsigned below(unsigned n) {
    random = random * 6364136223846793005ull + 1442695040888963407ull;
    return unsigned((random >> 33) % n);
  }

  int thread_number(const Fiber& fiber) const { return int(&fiber - fibers.data()); }

  void describe(const Fiber& fiber) const {
    const int thread = thread_number(fiber);
    std::fprintf(stderr, "thread %d (wave %d, lane %d) ", thread, thread / kLanes, thread % kLanes);
    if (fiber.state == State::kDone) {
      std::fprintf(stderr, "has returned");
    } else {
      std::fprintf(stderr, "waits in %s at %s:%d", fiber.site.what, fiber.site.file, fiber.site.line);
    }
  }

  // Reports both sides, because either may be the mistake.
  [[noreturn]] void fail(const char* message, const Fiber& a, const Fiber& b) const {
    std::fprintf(stderr, "hip_ops cpu: %s in block (%u, %u, %u): ", message, index.x, index.y, index.z);
    describe(a);
    std::fprintf(stderr, ", but ");
    describe(b);
    std::fprintf(stderr, "\n");
    std::abort();
  }

  void read_schedule() {
    const char* value = std::getenv("HO_CPU_SCHEDULE");
    if (value == nullptr || *value == 0 || std::strcmp(value, "forward") == 0) {
      order = Order::kForward;
    } else if (std::strcmp(value, "reverse") == 0) {
      order = Order::kReverse;
    } else if (std::strncmp(value, "random:", 7) == 0) {
      order = Order::kRandom;
      random = std::strtoull(value + 7, nullptr, 10);
    } else {
      std::fprintf(stderr, "hip_ops cpu: HO_CPU_SCHEDULE=%s: no such schedule. Allowed: forward, reverse, random:<seed>.\n", value);
      std::abort();
    }
  }

  template <class T>
  void arrange(std::vector<T>& items) {
    if (order == Order::kReverse) std::reverse(items.begin(), items.end());
    if (order == Order::kRandom)
      for (unsigned i = unsigned(items.size()); i > 1; --i) std::swap(items[i - 1], items[below(i)]);
  }

  void suspend(State state, Site site) {
    current->state = state;
    current->site = site;
    current->stack.suspend(scheduler);
  }

  // Runs the lanes of a wave to their next collective, which must be the same for all.
  void step(unsigned wave) {
    std::vector<Fiber*> lanes;
    for (int lane = 0; lane < kLanes; ++lane) lanes.push_back(&fibers[wave * kLanes + lane]);
    const Fiber& first = *lanes[0];
    arrange(lanes);
    for (Fiber* lane : lanes) {
      current = lane;
      lane->stack.resume(scheduler);
    }
    for (Fiber* lane : lanes)
      if (lane->state != first.state || (first.state != State::kDone && !(lane->site == first.site)))
        fail("divergent collective within a wave", first, *lane);
    if (first.state == State::kInWave) {
      waves[wave].turn ^= 1;
      for (Fiber* lane : lanes) lane->state = State::kReady;
    }
  }

  void release() {
    for (unsigned i = 0; i < block.x; ++i) fibers[i].state = State::kReady;
  }

  void run_block() {
    ++block_number;
    release();
    std::vector<unsigned> ready;
    for (;;) {
      ready.clear();
      for (unsigned wave = 0; wave < waves.size(); ++wave)
        if (fibers[wave * kLanes].state == State::kReady) ready.push_back(wave);
      if (!ready.empty()) {
        step(order == Order::kForward ? ready.front() : order == Order::kReverse ? ready.back() : ready[below(unsigned(ready.size()))]);
        continue;
      }
      const Fiber& first = fibers[0];
      for (unsigned wave = 1; wave < waves.size(); ++wave) {
        const Fiber& other = fibers[wave * kLanes];
        if (other.state != first.state || (first.state != State::kDone && !(other.site == first.site)))
          fail("divergent barrier", first, other);
      }
      if (first.state == State::kDone) return;
      release();
    }
  }

  static void enter();

  void launch(dim3 grid_, dim3 block_, void (*body_)(void*), void* arguments_) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (block_.y != 1 || block_.z != 1 || block_.x == 0 || block_.x % kLanes != 0 || block_.x > kMaxThreads) {
      std::fprintf(stderr, "hip_ops cpu: block (%u, %u, %u); a block is one-dimensional, a multiple of 64 threads, at most 1024\n", block_.x,
                   block_.y, block_.z);
      std::abort();
    }
    read_schedule();
    grid = grid_, block = block_, body = body_, arguments = arguments_;
    waves.assign(block.x / kLanes, Wave());
    for (unsigned i = 0; i < block.x; ++i) {
      fibers[i].thread = dim3(i, 0, 0);
      fibers[i].stack.start(&Machine::enter);
    }
    std::vector<dim3> blocks;
    for (unsigned z = 0; z < grid.z; ++z)
      for (unsigned y = 0; y < grid.y; ++y)
        for (unsigned x = 0; x < grid.x; ++x) blocks.push_back(dim3(x, y, z));
    arrange(blocks);
    for (const dim3& at : blocks) {
      index = at;
      run_block();
    }
    current = nullptr;
  }
};

inline Machine machine;

// A fiber serves the same thread of every block of the launch; at the last one it is left suspended.
inline void Machine::enter() {
  machine.current->stack.entered(machine.scheduler);
  for (;;) {
    machine.body(machine.arguments);
    machine.suspend(State::kDone, Site());
  }
}

inline Fiber& current() { return *machine.current; }
inline int lane() { return machine.thread_number(*machine.current) % kLanes; }

// A collective of the wave: every lane contributes `mine`, and may then read those of all lanes.
struct Exchange {
  unsigned char (*slots)[16];
  template <class T>
  T of(int lane) const {
    T value;
    std::memcpy(&value, slots[lane], sizeof(T));
    return value;
  }
};

template <class T>
inline void put(int set, T mine) {
  static_assert(sizeof(T) <= 16, "a slot has 16 bytes");
  Wave& wave = machine.waves[machine.thread_number(*machine.current) / kLanes];
  std::memcpy(wave.slots[wave.turn][set][lane()], &mine, sizeof(T));
}

// After put(): waits for the wave.
inline void meet(Exchange& first, Exchange& second, Site site) {
  Wave& wave = machine.waves[machine.thread_number(*machine.current) / kLanes];
  const unsigned turn = wave.turn;
  machine.suspend(State::kInWave, site);
  first.slots = wave.slots[turn][0];
  second.slots = wave.slots[turn][1];
}

// Fills an LDS array with NaNs (all bits set) when the first thread of a block reaches its declaration.
inline void poison_once(void* array, size_t bytes, uint64_t& seen) {
  if (seen == machine.block_number) return;
  seen = machine.block_number;
  std::memset(array, 0xff, bytes);
}

}  // namespace ho_cpu

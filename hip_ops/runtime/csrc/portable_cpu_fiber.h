// SPDX-License-Identifier: Apache-2.0
// Switching between stacks on one OS thread, for portable_cpu.h: by hand on x86-64, through ucontext elsewhere. Every
// switch is reported to AddressSanitizer, which otherwise takes a fiber's stack for a wild pointer.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define HO_ASAN 1
#else
#define HO_ASAN 0
#endif

#if !defined(__x86_64__) && !defined(HO_CPU_UCONTEXT)
#define HO_CPU_UCONTEXT 1
#endif
#ifdef HO_CPU_UCONTEXT
#include <ucontext.h>
#endif

namespace ho_cpu {

#ifdef HO_CPU_UCONTEXT
struct Context {
  ucontext_t saved;
};
inline void switch_context(Context& from, Context& to) { swapcontext(&from.saved, &to.saved); }
inline void prepare(Context& context, char* bottom, size_t size, void (*entry)()) {
  getcontext(&context.saved);
  context.saved.uc_stack.ss_sp = bottom;
  context.saved.uc_stack.ss_size = size;
  context.saved.uc_link = nullptr;
  makecontext(&context.saved, entry, 0);
}
#else
struct Context {
  void* stack_pointer;
};
// Saves the callee-saved registers on the current stack and loads those of the other. Kernels do not change the rounding mode.
static __attribute__((naked, noinline)) void switch_stack_pointer(void** /*save: rdi*/, void* /*load: rsi*/) {
  asm("pushq %rbp\n\tpushq %rbx\n\tpushq %r12\n\tpushq %r13\n\tpushq %r14\n\tpushq %r15\n\t"
      "movq %rsp, (%rdi)\n\t"
      "movq %rsi, %rsp\n\t"
      "popq %r15\n\tpopq %r14\n\tpopq %r13\n\tpopq %r12\n\tpopq %rbx\n\tpopq %rbp\n\t"
      "ret");
}
inline void switch_context(Context& from, Context& to) { switch_stack_pointer(&from.stack_pointer, to.stack_pointer); }
inline void prepare(Context& context, char* bottom, size_t size, void (*entry)()) {
  void** top = reinterpret_cast<void**>(bottom + size);  // bottom and size are multiples of a page
  *--top = nullptr;                                      // the return address that entry() never uses; aligns the stack as a call would
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context.stack_pointer = top;
}
#endif

// The stack that the scheduler itself runs on, as AddressSanitizer reports it at each switch into a fiber.
struct SchedulerStack {
  Context context;
  void* fake = nullptr;
  const void* bottom = nullptr;
  size_t size = 0;
};

struct FiberStack {
  Context context;
  void* fake = nullptr;
  char* bottom = nullptr;

  static constexpr size_t kSize = (HO_ASAN ? 1024 : 256) * 1024;  // AddressSanitizer surrounds every local with guard bytes
  static constexpr size_t kGuard = 4096;

  void start(void (*entry)()) {
    if (bottom == nullptr) {
      // Backed by memory on first use; not unmapped, because the next launch uses it again. The guard page turns an overflow into a fault.
      void* memory = mmap(nullptr, kGuard + kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED || mprotect(memory, kGuard, PROT_NONE) != 0) {
        std::fprintf(stderr, "hip_ops cpu: no memory for the stack of a fiber\n");
        std::abort();
      }
      bottom = static_cast<char*>(memory) + kGuard;
    }
#if HO_ASAN
    __asan_unpoison_memory_region(bottom, kSize);  // frames of the previous launch on this fiber
#endif
    fake = nullptr;
    prepare(context, bottom, kSize, entry);
  }

  void resume(SchedulerStack& scheduler) {
#if HO_ASAN
    __sanitizer_start_switch_fiber(&scheduler.fake, bottom, kSize);
#endif
    switch_context(scheduler.context, context);
#if HO_ASAN
    __sanitizer_finish_switch_fiber(scheduler.fake, nullptr, nullptr);
#endif
  }

  void suspend(SchedulerStack& scheduler) {
#if HO_ASAN
    __sanitizer_start_switch_fiber(&fake, scheduler.bottom, scheduler.size);
#endif
    switch_context(context, scheduler.context);
    entered(scheduler);
  }

  void entered(SchedulerStack& scheduler) {
#if HO_ASAN
    __sanitizer_finish_switch_fiber(fake, &scheduler.bottom, &scheduler.size);
#else
    (void)scheduler;
#endif
  }
};

}  // namespace ho_cpu

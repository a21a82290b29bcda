// How a host-built module tells the stand-in driver which kernels it has.
#pragma once

#include <cstddef>
#include <utility>

#include "fibres.h"

namespace fake {

struct Kernel {
  const char* name;
  void (*run)(void** arguments, const LaunchSize& size);
  unsigned argument_count;
  const std::size_t* argument_bytes;
};

struct KernelTable {
  const Kernel* kernels;
  unsigned count;
};

// The symbol that the driver looks up in a module.
using KernelTableFunction = KernelTable (*)();
constexpr const char* KERNEL_TABLE_SYMBOL = "fake_kernel_table";

template <auto function>
struct Adapter;

template <class... Argument, void (*function)(Argument...)>
struct Adapter<function> {
  static constexpr std::size_t bytes[] = {sizeof(Argument)...};

  template <std::size_t... i>
  static void call(void** arguments, std::index_sequence<i...>) {
    function(*static_cast<Argument*>(arguments[i])...);
  }
  static void run(void** arguments, const LaunchSize& size) {
    run_grid(size, [=] { call(arguments, std::index_sequence_for<Argument...>{}); });
  }
  static constexpr Kernel kernel(const char* name) {
    return {name, run, sizeof...(Argument), bytes};
  }
};

}  // namespace fake

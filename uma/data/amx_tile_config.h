// For builds of llama.cpp by GCC 12, whose _tile_loadconfig tells the compiler that it reads 8 of the 64 bytes it reads,
// so that the rest of AMX's tile configuration is never written and the first use of AMX ends the process.
// Harmless with compilers that do it right. Use: CXXFLAGS="-include .../amx_tile_config.h"
#pragma once
#if defined(__AMX_TILE__)
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(const char(*)[64])(config)))
#endif

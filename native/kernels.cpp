#include "kernels.h"

#include <cstring>

namespace loraproxy {

#if defined(__x86_64__) || defined(_M_X64)
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
#elif defined(__aarch64__) || defined(_M_ARM64)
namespace neon { extern const Kernels kernels; }
#endif
namespace plain { extern const Kernels kernels; }

const Kernels * choose_kernels(const char * force) {
    const auto wanted = [force](const char * name) { return !force || !*force || std::strcmp(force, name) == 0; };
#if defined(__x86_64__) || defined(_M_X64)
    __builtin_cpu_init();
    // every processor with AVX2 has F16C
    const bool f16c = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (wanted("avx512") && f16c && __builtin_cpu_supports("avx512f")) {
        return &avx512::kernels;
    }
    if (wanted("avx2") && f16c) {
        return &avx2::kernels;
    }
#elif defined(__aarch64__) || defined(_M_ARM64)
    if (wanted("neon")) {
        return &neon::kernels;
    }
#endif
    return wanted("plain") ? &plain::kernels : nullptr;
}

} // namespace loraproxy

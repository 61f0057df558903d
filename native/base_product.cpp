#include "base_product.h"

#include "kernels.h"

#include <cstring>

namespace loraproxy {

#if defined(__x86_64__) || defined(_M_X64)
namespace avx2 { const BaseProduct * base_product(ggml_type type); }
#endif

void Activations::resize(int rows, int inputs) {
    n_rows              = rows;
    n_in                = inputs;
    const size_t blocks = static_cast<size_t>(inputs) / BLOCK;
    q.resize(static_cast<size_t>(rows) * inputs);
    d.resize(blocks * rows);
    s.resize(blocks * 2 * rows);
}

const BaseProduct * choose_base_product(ggml_type type, int64_t n_in, const char * force) {
    if (n_in % BLOCK != 0 || n_in % ggml_blck_size(type) != 0) {
        return nullptr;
    }
#if defined(__x86_64__) || defined(_M_X64)
    const Kernels * kernels = choose_kernels(force);
    const bool avx2 = kernels && (std::strcmp(kernels->name, "avx2") == 0 || std::strcmp(kernels->name, "avx512") == 0);
    return avx2 ? avx2::base_product(type) : nullptr;
#else
    (void) force;
    return nullptr;
#endif
}

} // namespace loraproxy

#include "weights.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace loraproxy {

// -- memory --------------------------------------------------------------------------------------------------

namespace {

constexpr size_t HUGE_PAGE = size_t(2) << 20;

size_t aligned(size_t bytes) { return blocks_of(bytes, 128) * 128; }

} // namespace

AdapterWeights::AdapterWeights(size_t n_targets, std::vector<Part> parts) : pairs_(n_targets) {
    std::stable_sort(parts.begin(), parts.end(), [](const Part & a, const Part & b) { return a.target < b.target; });
    for (const Part & part : parts) {
        bytes_ += aligned(part.a.size()) + aligned(part.bt.size()) + aligned(part.factors.size() * sizeof(float));
    }
    map(std::max<size_t>(bytes_, 1));
    uint8_t * at = memory_;
    for (Part & part : parts) {
        Pair &          pair    = pairs_[part.target];
        const uint8_t * factors = at;
        at                      = put(at, part.factors.data(), part.factors.size() * sizeof(float));
        const uint8_t * a       = at;
        at                      = put(at, part.a.data(), part.a.size());
        const uint8_t * bt      = at;
        at                      = put(at, part.bt.data(), part.bt.size());
        pair.rank               = part.rank;
        pair.scale              = part.scale;
        if (part.factors.empty()) {
            pair.a  = reinterpret_cast<const uint16_t *>(a);
            pair.bt = reinterpret_cast<const uint16_t *>(bt);
        } else {
            pair.factors = reinterpret_cast<const float *>(factors);
            pair.a8      = reinterpret_cast<const int8_t *>(a);
            pair.bt8     = reinterpret_cast<const int8_t *>(bt);
        }
        part = Part(); // not twice in memory
    }
}

uint8_t * AdapterWeights::put(uint8_t * at, const void * values, size_t n_bytes) {
    if (n_bytes > 0) {
        std::memcpy(at, values, n_bytes);
    }
    return at + aligned(n_bytes);
}

#if defined(__unix__) || defined(__APPLE__)

// Pages of its own, which go back to the system when the adapter leaves; malloc would keep them, in pieces.
void AdapterWeights::map(size_t size) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    mapped_bytes_     = blocks_of(size, page) * page;
    void * room       = mmap(nullptr, mapped_bytes_ + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (room == MAP_FAILED) {
        throw std::bad_alloc();
    }
    // only the part that begins on a boundary stays, to its last page: what lay behind it could become a huge page, too
    const uintptr_t begin = reinterpret_cast<uintptr_t>(room);
    const uintptr_t start = blocks_of(begin, HUGE_PAGE) * HUGE_PAGE;
    if (start > begin) {
        munmap(room, start - begin);
    }
    if (start < begin + HUGE_PAGE) {
        munmap(reinterpret_cast<void *>(start + mapped_bytes_), begin + HUGE_PAGE - start);
    }
    mapped_ = reinterpret_cast<void *>(start);
    memory_ = static_cast<uint8_t *>(mapped_);
#ifdef MADV_HUGEPAGE
    // a step reads it all: with 4 KiB pages the misses of the page table cost a third of the bandwidth
    if (size >= HUGE_PAGE) {
        madvise(memory_, size / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);
    }
#endif
}

AdapterWeights::~AdapterWeights() { munmap(mapped_, mapped_bytes_); }

#else

void AdapterWeights::map(size_t size) {
    mapped_ = std::malloc(size + HUGE_PAGE);
    if (mapped_ == nullptr) {
        throw std::bad_alloc();
    }
    memory_ = reinterpret_cast<uint8_t *>(blocks_of(reinterpret_cast<uintptr_t>(mapped_), HUGE_PAGE) * HUGE_PAGE);
}

AdapterWeights::~AdapterWeights() { std::free(mapped_); }

#endif

// -- layouts -------------------------------------------------------------------------------------------------

namespace {

// Rounding to 8 bits moves B A by at most this much of its norm, or the pair stays in f16. Trained and random pairs are
// at 0.009; a few values far above the rest make it more.
constexpr double COARSEST = 0.015;

// A row of A or of B transposed.
struct Row {
    float  largest = 0.0f;
    double squares = 0.0;
};

Row measure(const float * values, size_t n) {
    float  largest[8] = {}, squares[8] = {}; // eight at a time, so that the compiler can use vectors
    size_t i          = 0;
    for (; i + 8 <= n; i += 8) {
        for (size_t j = 0; j < 8; ++j) {
            const float v = std::fabs(values[i + j]);
            largest[j]    = v > largest[j] ? v : largest[j];
            squares[j] += v * v;
        }
    }
    Row row;
    for (; i < n; ++i) {
        largest[0] = std::max(largest[0], std::fabs(values[i]));
        squares[0] += values[i] * values[i];
    }
    for (size_t j = 0; j < 8; ++j) {
        row.largest  = std::max(row.largest, largest[j]);
        row.squares += squares[j];
    }
    return row;
}

// Rows of a matrix, each `n` values.
struct Rows {
    const float *    values;
    size_t           n;
    std::vector<Row> rows;

    Rows(const float * from, size_t n_rows, size_t n_values) : values(from), n(n_values), rows(n_rows) {
        for (size_t r = 0; r < n_rows; ++r) {
            rows[r] = measure(from + r * n_values, n_values);
        }
    }

    const float * row(size_t r) const { return values + r * n; }

    float largest() const {
        float most = 0.0f;
        for (const Row & row : rows) {
            most = std::max(most, row.largest);
        }
        return most;
    }

    // The square of what rounding row r to steps of largest / 127 moves it by: errors are uniform in a step.
    double error(size_t r) const {
        const double step = rows[r].largest / 127.0;
        return step * step / 12.0 * static_cast<double>(n);
    }

    float step(size_t r) const { return rows[r].largest / 127.0f; }

    // Whether steps and squares are numbers; not where they overflow or vanish, which nobody trains.
    bool are_measured() const {
        for (const Row & row : rows) {
            const float per_step = row.largest > 0.0f ? 127.0f / row.largest : 1.0f;
            if (!std::isfinite(row.squares) || !std::isfinite(per_step) || (row.largest > 0.0f && row.squares < 1e-30)) {
                return false;
            }
        }
        return true;
    }
};

// Whether 8 bits will do: B A is a sum over the ranks, and each counts with what it brings there. A large rank of A
// that B does not use hides nothing.
bool fit_8_bits(const Rows & a, const Rows & bt) {
    if (!a.are_measured() || !bt.are_measured()) {
        return false;
    }
    double error = 0.0, whole = 0.0;
    for (size_t r = 0; r < a.rows.size(); ++r) {
        error += a.error(r) * bt.rows[r].squares + bt.error(r) * a.rows[r].squares;
        whole += a.rows[r].squares * bt.rows[r].squares;
    }
    return error <= COARSEST * COARSEST * whole;
}

// An exponent e such that values up to `largest` times 2^-e lie just below f16's limit: whatever range the
// file's type had, nothing overflows and little is subnormal.
int f16_exponent(float largest) {
    int exponent = 15;
    if (largest > 0.0f) {
        std::frexp(largest, &exponent); // largest = f * 2^exponent, f < 1
    }
    return std::max(exponent - 15, -120); // so that 2^-e is a float
}

std::vector<float> transposed(const float * values, size_t n_rows, size_t n_columns) {
    std::vector<float> out(n_rows * n_columns);
    for (size_t i = 0; i < n_rows; ++i) {
        for (size_t j = 0; j < n_columns; ++j) {
            out[j * n_rows + i] = values[i * n_columns + j];
        }
    }
    return out;
}

// `put(r, from, n, to)` converts n values of row r.
template <class Weight, class Put>
std::vector<uint8_t> tile_a(const Rows & a, Put put) {
    const size_t         rank = a.rows.size(), depths = blocks_of(a.n, DEPTH);
    std::vector<uint8_t> out(blocks_of(rank, RANKS) * depths * RANKS * DEPTH * sizeof(Weight), 0);
    Weight *             to = reinterpret_cast<Weight *>(out.data());
    for (size_t r = 0; r < rank; ++r) {
        for (size_t k = 0; k < a.n; k += DEPTH) {
            const size_t tile = r / RANKS * depths + k / DEPTH;
            put(r, a.row(r) + k, std::min<size_t>(DEPTH, a.n - k), to + (tile * RANKS + r % RANKS) * DEPTH);
        }
    }
    return out;
}

template <class Weight, class Put>
std::vector<uint8_t> block_b(const Rows & bt, Put put) {
    const size_t         rank = bt.rows.size();
    std::vector<uint8_t> out(blocks_of(bt.n, COLUMNS) * rank * COLUMNS * sizeof(Weight), 0);
    Weight *             to = reinterpret_cast<Weight *>(out.data());
    for (size_t r = 0; r < rank; ++r) {
        for (size_t j = 0; j < bt.n; j += COLUMNS) {
            put(r, bt.row(r) + j, std::min<size_t>(COLUMNS, bt.n - j), to + (j / COLUMNS * rank + r) * COLUMNS);
        }
    }
    return out;
}

// A (rank, n_vocab) by token
std::vector<uint8_t> by_token(const Kernels & kernels, const float * a, size_t rank, size_t n_vocab, float factor) {
    std::vector<uint8_t>     out(rank * n_vocab * sizeof(uint16_t));
    const std::vector<float> tokens = transposed(a, rank, n_vocab);
    kernels.narrow(tokens.data(), tokens.size(), factor, reinterpret_cast<uint16_t *>(out.data()));
    return out;
}

AdapterWeights::Part in_8_bits(const Kernels & kernels, const Rows & a, const Rows & bt, float scale) {
    const size_t rank = a.rows.size();
    // factors up to 2^8, so that factor * bt8 fits f16 as the other form does; the rest of them goes into the scale
    double most = 0.0;
    for (size_t r = 0; r < rank; ++r) {
        most = std::max(most, static_cast<double>(a.step(r)) * bt.step(r));
    }
    int exponent = 0;
    std::frexp(most, &exponent);
    exponent -= 8;
    AdapterWeights::Part part;
    part.scale = std::ldexp(scale, exponent);
    part.factors.assign(blocks_of(rank, RANKS) * RANKS, 0.0f);
    for (size_t r = 0; r < rank; ++r) {
        part.factors[r] = static_cast<float>(std::ldexp(static_cast<double>(a.step(r)) * bt.step(r), -exponent));
    }
    const auto in_steps_of = [&](const Rows & rows) {
        return [&](size_t r, const float * from, size_t n, int8_t * to) {
            kernels.round(from, n, rows.rows[r].largest > 0.0f ? 127.0f / rows.rows[r].largest : 0.0f, to);
        };
    };
    part.a  = tile_a<int8_t>(a, in_steps_of(a));
    part.bt = block_b<int8_t>(bt, in_steps_of(bt));
    return part;
}

} // namespace

AdapterWeights::Part convert(const Kernels & kernels, const float * a, const float * b, size_t rank, size_t n_in, size_t n_out,
                             float scale, Form form) {
    const std::vector<float> columns = transposed(b, n_out, rank);
    const Rows               a_rows(a, rank, n_in), bt_rows(columns.data(), rank, n_out);
    AdapterWeights::Part     part;
    if (form == Form::eight_bits && fit_8_bits(a_rows, bt_rows)) {
        part = in_8_bits(kernels, a_rows, bt_rows, scale);
    } else {
        const int  ea = f16_exponent(a_rows.largest()), eb = f16_exponent(bt_rows.largest());
        const auto halved = [&](int exponent) {
            return [&kernels, factor = std::ldexp(1.0f, -exponent)](size_t, const float * from, size_t n, uint16_t * to) {
                kernels.narrow(from, n, factor, to);
            };
        };
        part.scale = std::ldexp(scale, ea + eb);
        part.a     = form == Form::by_token ? by_token(kernels, a, rank, n_in, std::ldexp(1.0f, -ea)) : tile_a<uint16_t>(a_rows, halved(ea));
        part.bt    = block_b<uint16_t>(bt_rows, halved(eb));
    }
    part.rank = static_cast<int>(rank);
    return part;
}

} // namespace loraproxy

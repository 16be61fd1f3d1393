// softmax(scale q.k) v with a causal mask, in bf16, for CPUs with AVX-512 BF16. `cpu_kernel.py` compiles it and lays its operands out.
//
// Scores, their exponentials and all sums are in fp32; weights are rounded to bf16 for their product with the values. A thread computes one
// block of queries against one block of keys after the other, and rescales its sums where a row's maximum grows (Milakov and
// Gimelshein 2018, arXiv 1805.02867). A block of queries is computed by one thread in one order: the number of threads changes no bit.

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

namespace {

using bf16 = uint16_t;
constexpr int LANES = 16;                             // fp32 numbers of a register; a tile has ROWS rows of WIDTH = 2 LANES columns
constexpr int64_t QUERIES = 8 * ROWS, KEYS = 256;     // of a block: its keys, values, scores and sums stay in the cache
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

using Tile = __m512[ROWS][2];

// tile = rows (ROWS, 2 pairs) x columns (pairs, WIDTH, 2), where the two rows of a pair lie side by side.
inline void multiply(const bf16* rows, int64_t row_stride, const bf16* columns, int64_t pair_stride, int64_t pairs, Tile& tile) {
    Tile sums;  // local, so that they stay in registers whatever is done with the tile
    for (auto& row : sums) row[0] = row[1] = _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; ++p, columns += pair_stride) {
        const auto left = (__m512bh)_mm512_loadu_si512(columns), right = (__m512bh)_mm512_loadu_si512(columns + WIDTH);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            int32_t pair;
            std::memcpy(&pair, rows + r * row_stride + 2 * p, sizeof pair);
            const auto factor = (__m512bh)_mm512_set1_epi32(pair);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], factor, left);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], factor, right);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) tile[r][0] = sums[r][0], tile[r][1] = sums[r][1];
}

// 2^x with a relative error below 1e-6: n, the nearest whole number, and 2^(x - n) by least squares.
inline __m512 power_of_two(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, 0), rest = _mm512_sub_ps(x, n);
    __m512 y = _mm512_set1_ps(1.326701e-3f);
    for (const float coefficient : {9.675460e-3f, 5.5507431e-2f, 2.4022122e-1f, 6.9314695e-1f, 1.0f})
        y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(coefficient));
    return _mm512_scalef_ps(y, n);  // of -inf it is 0, although `rest` and y are NaN
}

struct Call {
    const bf16 *q, *k, *v;  // (heads, queries, size); (heads, keys / WIDTH, size / 2, WIDTH, 2); (heads, keys / 2, width, 2)
    bf16* output;           // (heads, queries, width)
    int64_t heads, queries, keys, first, size, width;  // `first`: keys that the first query sees besides its own
    float scale;                                       // of scores, over ln 2: weights are powers of 2

    // The queries `begin` to `end` of a head, in tiles of ROWS.
    void block(int64_t head, int64_t begin, int64_t end) const {
        alignas(64) float scores[ROWS][KEYS], totals[QUERIES] = {}, maxima[QUERIES];
        alignas(64) bf16 weights[ROWS][KEYS];
        std::vector<float> sums(QUERIES * width);
        std::fill_n(maxima, QUERIES, LOWEST);
        for (int64_t key = 0; key < first + end; key += KEYS)
            for (int64_t row = begin; row < end; row += ROWS) {
                const int64_t beyond = first + row + ROWS;  // the last query of the tile sees keys below
                if (key < beyond) {
                    const int64_t count = std::min(KEYS, (beyond - key + WIDTH - 1) / WIDTH * WIDTH), i = row - begin;
                    tile(head, row, key, std::min(count, keys - key), scores, weights, maxima + i, totals + i, &sums[i * width]);
                }
            }
        for (int64_t i = 0; i < end - begin; ++i)
            for (int64_t e = 0; e < width; e += LANES) {
                const __m512 mean = _mm512_div_ps(_mm512_loadu_ps(&sums[i * width + e]), _mm512_set1_ps(totals[i]));
                _mm256_storeu_si256((__m256i*)(output + (head * queries + begin + i) * width + e), (__m256i)_mm512_cvtneps_pbh(mean));
            }
    }

    // Add ROWS queries' weights of `count` keys, and their values, to the queries' totals and sums.
    void tile(int64_t head, int64_t row, int64_t key, int64_t count, float (&scores)[ROWS][KEYS], bf16 (&weights)[ROWS][KEYS],
              float* maxima, float* totals, float* sums) const {
        Tile product;
        __m512 largest[ROWS];
        for (auto& x : largest) x = _mm512_set1_ps(LOWEST);
        for (int64_t j = 0; j < count; j += WIDTH) {
            multiply(q + (head * queries + row) * size, size, k + (head * keys + key + j) * size, 2 * WIDTH, size / 2, product);
            for (int r = 0; r < ROWS; ++r) {
                product[r][0] = _mm512_mul_ps(product[r][0], _mm512_set1_ps(scale));
                product[r][1] = _mm512_mul_ps(product[r][1], _mm512_set1_ps(scale));
                const int64_t visible = first + row + r + 1 - key - j;
                if (visible < WIDTH) {
                    const uint32_t mask = visible > 0 ? (1u << visible) - 1 : 0;
                    product[r][0] = _mm512_mask_mov_ps(_mm512_set1_ps(LOWEST), mask, product[r][0]);
                    product[r][1] = _mm512_mask_mov_ps(_mm512_set1_ps(LOWEST), mask >> LANES, product[r][1]);
                }
                largest[r] = _mm512_max_ps(_mm512_max_ps(product[r][0], product[r][1]), largest[r]);
                _mm512_store_ps(&scores[r][j], product[r][0]);
                _mm512_store_ps(&scores[r][j + LANES], product[r][1]);
            }
        }
        float factors[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            const float maximum = std::max(maxima[r], _mm512_reduce_max_ps(largest[r]));
            const __m512 shift = _mm512_set1_ps(maximum == LOWEST ? 0.0f : maximum);
            __m512 total = _mm512_setzero_ps();
            for (int64_t j = 0; j < count; j += WIDTH) {
                const __m512 left = power_of_two(_mm512_sub_ps(_mm512_load_ps(&scores[r][j]), shift));
                const __m512 right = power_of_two(_mm512_sub_ps(_mm512_load_ps(&scores[r][j + LANES]), shift));
                total = _mm512_add_ps(total, _mm512_add_ps(left, right));
                _mm512_store_si512(&weights[r][j], (__m512i)_mm512_cvtne2ps_pbh(right, left));
            }
            factors[r] = maximum == LOWEST ? 1.0f : std::exp2(maxima[r] - maximum);
            totals[r] = totals[r] * factors[r] + _mm512_reduce_add_ps(total);
            maxima[r] = maximum;
        }
        for (int64_t e = 0; e < width; e += WIDTH) {
            multiply(weights[0], KEYS, v + (head * keys + key) * width + 2 * e, 2 * width, count / 2, product);
            for (int r = 0; r < ROWS; ++r)
                for (int half = 0; half < 2; ++half) {
                    float* sum = sums + r * width + e + half * LANES;
                    _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_loadu_ps(sum), _mm512_set1_ps(factors[r]), product[r][half]));
                }
        }
    }
};

}  // namespace

// `queries` is a multiple of ROWS, `keys` and `width` are multiples of WIDTH, `size` is even, `scale` is positive.
extern "C" void causal_softmax(const bf16* q, const bf16* k, const bf16* v, bf16* output, int64_t heads, int64_t queries, int64_t keys,
                               int64_t first, int64_t size, int64_t width, int64_t threads, float scale) {
    const Call call{q, k, v, output, heads, queries, keys, first, size, width, scale};
    const int64_t blocks = (queries + QUERIES - 1) / QUERIES;
    std::atomic<int64_t> next{heads * blocks};
    const auto work = [&] {  // the last blocks first: they have the most keys
        for (int64_t item; (item = --next) >= 0;) {
            const int64_t begin = item / heads * QUERIES;
            call.block(item % heads, begin, std::min(begin + QUERIES, queries));
        }
    };
    std::vector<std::thread> helpers;
    try {
        while (int64_t(helpers.size()) + 1 < std::min(threads, heads * blocks)) helpers.emplace_back(work);
    } catch (...) {  // no more threads: those that started share the work
    }
    work();
    for (auto& helper : helpers) helper.join();
}

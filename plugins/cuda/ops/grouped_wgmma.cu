/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of experts on compute capability 9.0a, in one launch that reads the offsets on the
 * device.
 *
 * As many blocks as the device has multiprocessors take tiles of C in turn: an expert's tiles
 * follow each other, so that its operands stay in the L2 cache. In a block one thread finds the
 * tiles and has the copy engine fill a ring of slices of the depth; two warpgroups multiply them,
 * each 64 rows of the tile. A warpgroup whose rows are all past the expert's end only lets the
 * slices pass.
 *
 * A weight gradient's depth is the expert's rows. A last slice that is not full brings rows of the
 * next expert; one more warp makes them zero before the warpgroups see it, so that not even a NaN
 * there reaches this expert. What a gradient is added to follows its slices through the ring where
 * the expert has few rows; where it has many the copy engine adds, which takes longer but leaves
 * the ring to the next tile's slices.
 */
#include "grouped.cuh"
#include "wgmma.cuh"

enum {
    ROWS = 128, /* of a tile */
    COLS = 256,
    DEPTH = BOX, /* of a slice */
    BAND = 16,   /* tiles that follow each other down C before the next column of tiles */
    MAX_EXPERTS = 1024,
    GROUP = 128, /* threads of a warpgroup */
    THREADS = 3 * GROUP,
    MULTIPLIERS = 8, /* warps */
    TILES = 2        /* that are handed on at a time */
};

/* Sums of a weight gradient leave through shared memory, OUT_COLS at a time; rows there are so far
 * apart that two of them take different banks. */
enum { OUT_COLS = 128, OUT_ROWS = 16, OUT_PITCH = OUT_COLS * 4 + 64 };

/* What they are added to arrives PIECE_COLS at a time in the place of a slice of B, in strips of so
 * few columns that two rows of one take all banks. */
enum {
    READ_DEPTH = 1024, /* rows of an expert up to which it arrives */
    PIECE_COLS = 64,
    STRIP_COLS = 16,
    STRIP_PITCH = STRIP_COLS * 4,
    STRIP_BYTES = ROWS * STRIP_PITCH,
    PIECE_BYTES = PIECE_COLS / STRIP_COLS * STRIP_BYTES
};
static_assert(PIECE_BYTES == COLS / BOX * BOX_BYTES, "a piece takes the place of a slice of B");

struct tile {
    int expert;      /* -1: there is no more */
    int row, rows;   /* the first of A and C; rows that are there from it on */
    int col, cols;   /* the same of B's rows and C's columns */
    int from, depth; /* where the depth begins, and its length */
    int read;        /* columns of C that arrive to be added to: all or none */
};

/* c: only where a weight gradient is added. */
struct tensor_maps {
    CUtensorMap a, b, c;
};

template <bool WEIGHTS> struct shape_of {
    static const int stages = WEIGHTS ? 3 : 4, out_bytes = WEIGHTS ? OUT_ROWS * OUT_PITCH : 16;
    static const int filled_by = WEIGHTS ? 32 : 1; /* threads: the lanes that make a tail zero */
};

template <bool WEIGHTS> struct shared_part {
    static const int STAGES = shape_of<WEIGHTS>::stages;
    alignas(1024) uint8_t a[STAGES][ROWS / BOX * BOX_BYTES];
    alignas(1024) uint8_t b[STAGES][COLS / BOX * BOX_BYTES];
    alignas(128) uint8_t out[MULTIPLIERS][shape_of<WEIGHTS>::out_bytes];
    uint64_t full[STAGES], empty[STAGES];
    uint64_t loaded[STAGES]; /* a slice whose tail is yet to be made zero */
    uint64_t told[TILES], taken[TILES];
    tile next[TILES];
    int32_t offset[MAX_EXPERTS + 1]; /* the product's */
    int32_t first[MAX_EXPERTS + 1];  /* the first tile of an expert; last: how many there are */
};

/* A place in a ring of N, and the parity of its barriers' phase there. */
template <int N> struct ring {
    int at, parity;

    __device__ __forceinline__ void advance(void)
    {
        at = at + 1 == N ? 0 : at + 1;
        parity ^= at == 0;
    }
};

static __device__ __forceinline__ int lane_id(void)
{
    return (int)threadIdx.x & 31;
}

/* ---- tiles -----------------------------------------------------------------------------------
 */

static __device__ __forceinline__ int tiles_of(int n, int size)
{
    return (n + size - 1) / size;
}

template <bool WEIGHTS>
static __device__ __forceinline__ int tiles_down(const grouped_product &p, int expert_rows)
{
    return tiles_of(WEIGHTS ? (int)p.m : expert_rows, ROWS);
}

/* The whole block makes the table of experts. */
template <bool WEIGHTS>
static __device__ void make_table(shared_part<WEIGHTS> &s, const grouped_product &p)
{
    for (int e = (int)threadIdx.x; e <= p.experts; e += THREADS)
        s.offset[e] = p.offsets[e];
    __syncthreads();
    if (threadIdx.x < 32) {
        int lane = lane_id(), across = tiles_of((int)p.n, COLS), before = 0;
        for (int base = 0; base < p.experts; base += 32) {
            int e = base + lane, sum = 0;
            int rows = e < p.experts ? s.offset[e + 1] - s.offset[e] : 0;
            /* Without rows there is nothing to do, but for a weight gradient that becomes zero. */
            if (rows > 0 || (WEIGHTS && !p.add && e < p.experts))
                sum = tiles_down<WEIGHTS>(p, rows) * across;
#pragma unroll
            for (int i = 1; i < 32; i *= 2) {
                int x = __shfl_up_sync(0xffffffffu, sum, i);
                sum += lane >= i ? x : 0;
            }
            if (e < p.experts)
                s.first[e + 1] = before + sum;
            before += __shfl_sync(0xffffffffu, sum, 31);
        }
        if (lane == 0)
            s.first[0] = 0;
    }
    __syncthreads();
}

template <bool WEIGHTS>
static __device__ tile find_tile(const shared_part<WEIGHTS> &s, const grouped_product &p, int index)
{
    tile t = {};
    int e = 0;
    for (int end = p.experts; end - e > 1;) { /* first[e] <= index < first[end] */
        int middle = (e + end) / 2;
        if (s.first[middle] <= index)
            e = middle;
        else
            end = middle;
    }
    int rows = s.offset[e + 1] - s.offset[e], down = tiles_down<WEIGHTS>(p, rows);
    int across = tiles_of((int)p.n, COLS), within = index - s.first[e];
    int band = within / (BAND * across) * BAND, height = min((int)BAND, down - band);
    within -= band * across;
    int y = band + within % height, x = within / height;
    t.expert = e;
    t.row = (WEIGHTS ? 0 : s.offset[e]) + y * ROWS;
    t.rows = (WEIGHTS ? (int)p.m : rows) - y * ROWS;
    t.col = x * COLS;
    t.cols = (int)p.n - t.col;
    t.from = WEIGHTS ? s.offset[e] : 0;
    t.depth = WEIGHTS ? rows : (int)p.k;
    t.read = WEIGHTS && p.add && rows <= READ_DEPTH ? min((int)COLS, t.cols) : 0;
    return t;
}

static __device__ __forceinline__ int slices_of(const tile &t)
{
    return tiles_of(t.depth, DEPTH);
}

static __device__ __forceinline__ int pieces_of(const tile &t)
{
    return tiles_of(t.read, PIECE_COLS);
}

/* The next tile, for a warp of those that share it. One lane reads it for all: the one that lets
 * its place go. */
template <bool WEIGHTS>
static __device__ __forceinline__ tile take_tile(shared_part<WEIGHTS> &s, ring<TILES> &tiles)
{
    int word[sizeof(tile) / sizeof(int)] = {};
    tile t;
    barrier_wait(&s.told[tiles.at], tiles.parity);
    if (lane_id() == 0) {
        memcpy(word, &s.next[tiles.at], sizeof word);
        barrier_arrive(&s.taken[tiles.at]);
    }
#pragma unroll
    for (int i = 0; i < (int)(sizeof word / sizeof *word); i++)
        word[i] = __shfl_sync(0xffffffffu, word[i], 0);
    memcpy(&t, word, sizeof t);
    tiles.advance();
    return t;
}

/* ---- what feeds the ring ---------------------------------------------------------------------
 */

/* Announces what copies bring to a stage, for all that may have something to do with its filling. */
template <bool WEIGHTS>
static __device__ __forceinline__ void expect_full(shared_part<WEIGHTS> &s, int stage, int bytes)
{
    barrier_expect(&s.full[stage], bytes);
    if constexpr (WEIGHTS)
        barrier_arrive_as(&s.full[stage], shape_of<WEIGHTS>::filled_by - 1);
}

template <bool WEIGHTS, bool B_DEEP>
static __device__ __forceinline__ void load_slice(shared_part<WEIGHTS> &s, int stage,
                                                  const tensor_maps &maps, const tile &t, int k)
{
    int boxes_a = t.rows > BOX ? 2 : 1, boxes_b = min(COLS / BOX, tiles_of(t.cols, BOX));
    bool partial = WEIGHTS && t.depth - k < DEPTH;
    uint64_t *arrived = partial ? &s.loaded[stage] : &s.full[stage];
    int deep = t.from + k, bytes = (boxes_a + boxes_b) * BOX_BYTES;
    if (partial)
        barrier_expect(arrived, bytes);
    else
        expect_full(s, stage, bytes);
    for (int i = 0; i < boxes_a; i++) {
        int row = t.row + i * BOX;
        load_box(s.a[stage] + i * BOX_BYTES, &maps.a, arrived, WEIGHTS ? row : deep,
                 WEIGHTS ? deep : row, 0);
    }
    for (int i = 0; i < boxes_b; i++) {
        int row = t.col + i * BOX;
        load_box(s.b[stage] + i * BOX_BYTES, &maps.b, arrived, B_DEEP ? row : deep,
                 B_DEEP ? deep : row, WEIGHTS ? 0 : t.expert);
    }
}

/* Rows and columns that C does not have count as if they came. */
template <bool WEIGHTS>
static __device__ __forceinline__ void load_piece(shared_part<WEIGHTS> &s, int stage,
                                                  const tensor_maps &maps, const tile &t, int first)
{
    expect_full(s, stage, PIECE_BYTES);
    for (int col = 0; col < PIECE_COLS; col += STRIP_COLS)
        load_box(s.b[stage] + col / STRIP_COLS * STRIP_BYTES, &maps.c, &s.full[stage],
                 t.col + first + col, t.row, t.expert);
}

/* One thread. */
template <bool WEIGHTS, bool B_DEEP>
static __device__ void feed(shared_part<WEIGHTS> &s, const grouped_product &p,
                            const tensor_maps &maps)
{
    ring<shape_of<WEIGHTS>::stages> slices = { 0, 1 };
    ring<TILES> tiles = { 0, 1 };
    int n_tiles = s.first[p.experts];
    for (int i = (int)blockIdx.x;; i += (int)gridDim.x) {
        tile t = {};
        t.expert = -1;
        if (i < n_tiles)
            t = find_tile(s, p, i);
        barrier_wait(&s.taken[tiles.at], tiles.parity);
        s.next[tiles.at] = t;
        barrier_arrive(&s.told[tiles.at]);
        tiles.advance();
        if (t.expert < 0)
            return;
        for (int k = 0; k < t.depth; k += DEPTH) {
            barrier_wait(&s.empty[slices.at], slices.parity);
            load_slice<WEIGHTS, B_DEEP>(s, slices.at, maps, t, k);
            slices.advance();
        }
        for (int first = 0; first < t.read; first += PIECE_COLS) {
            barrier_wait(&s.empty[slices.at], slices.parity);
            load_piece(s, slices.at, maps, t, first);
            slices.advance();
        }
    }
}

/* One warp: rows of both operands that are not the expert's become zero. */
static __device__ void clear_tails(shared_part<true> &s)
{
    const int stages = shape_of<true>::stages;
    ring<TILES> tiles = { 0, 0 };
    int first = 0;         /* stage of the tile */
    unsigned parities = 0; /* a bit for each stage */
    for (;;) {
        tile t = take_tile(s, tiles);
        if (t.expert < 0)
            return;
        int stage = (first + t.depth / DEPTH) % stages, tail = t.depth % DEPTH;
        first = (first + slices_of(t) + pieces_of(t)) % stages;
        if (tail == 0)
            continue;
        barrier_wait(&s.loaded[stage], (int)(parities >> stage & 1u));
        parities ^= 1u << stage;
        for (int i = 0; i < (ROWS + COLS) / BOX; i++) {
            uint8_t *box = i < ROWS / BOX ? s.a[stage] + i * BOX_BYTES
                                          : s.b[stage] + (i - ROWS / BOX) * BOX_BYTES;
            int4 *piece = reinterpret_cast<int4 *>(box + tail * 128);
            for (int k = lane_id(); k < (DEPTH - tail) * 8; k += 32)
                piece[k] = make_int4(0, 0, 0, 0);
        }
        publish();
        barrier_arrive(&s.full[stage]);
    }
}

/* ---- what empties it -------------------------------------------------------------------------
 */

template <bool WEIGHTS, bool B_DEEP, int N>
static __device__ __forceinline__ void multiply(shared_part<WEIGHTS> &s, int slices, int group,
                                                ring<shape_of<WEIGHTS>::stages> &at, float *sum)
{
    int last = at.at;
    for (int i = 0; i < slices; i++) {
        barrier_wait(&s.full[at.at], at.parity);
        uint64_t a = operand_at<WEIGHTS>(s.a[at.at] + group * BOX_BYTES);
        uint64_t b = operand_at<B_DEEP>(s.b[at.at]);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++)
            wgmma<N, WEIGHTS, B_DEEP>::add(sum, a + k * next_depth<WEIGHTS>(),
                                           b + k * next_depth<B_DEEP>());
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0 && lane_id() == 0)
            barrier_arrive(&s.empty[last]);
        last = at.at;
        at.advance();
    }
    wgmma_wait<0>();
    if (slices > 0 && lane_id() == 0)
        barrier_arrive(&s.empty[last]);
    settle<N / 2>(sum);
}

template <bool WEIGHTS>
static __device__ __forceinline__ void pass_over(shared_part<WEIGHTS> &s, int stages,
                                                 ring<shape_of<WEIGHTS>::stages> &at)
{
    for (int i = 0; i < stages; i++) {
        barrier_wait(&s.full[at.at], at.parity);
        if (lane_id() == 0)
            barrier_arrive(&s.empty[at.at]);
        at.advance();
    }
}

/* The 4 x 4 words that each 4 lanes hold: lane q has column q, and gets row q. */
static __device__ __forceinline__ void transpose_quad(uint32_t *v)
{
    int q = lane_id() & 3;
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & distance)
                continue;
            uint32_t send = q & distance ? v[i] : v[i + distance];
            uint32_t got = __shfl_xor_sync(0xffffffffu, send, distance);
            if (q & distance)
                v[i] = got;
            else
                v[i + distance] = got;
        }
}

static __device__ __forceinline__ float2 to_pair(uint32_t x)
{
    return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 *>(&x));
}

static __device__ __forceinline__ uint32_t from_pair(float x, float y)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<uint32_t *>(&v);
}

/* The warpgroup's 64 rows of N columns, with the bias, or added to what is there; rounded once. A
 * lane has 2 columns of each 8; four lanes exchange theirs so that each moves 16 bytes. */
template <int N>
static __device__ __forceinline__ void put_rows(const grouped_product &p, const tile &t, int group,
                                                const float *sum)
{
    int lane = lane_id(), q = lane & 3;
    int row = group * BOX + ((int)threadIdx.x >> 5 & 3) * 16 + lane / 4;
    bf16 *c = static_cast<bf16 *>(p.c) + (t.row + (int64_t)row) * p.ldc + t.col;
    const bf16 *bias = static_cast<const bf16 *>(p.bias);
    if (bias)
        bias += t.expert * p.ld_bias + t.col;
#pragma unroll
    for (int j = 0; j < N / 8; j += 4) {
        if (j * 8 >= t.cols)
            break;
        float2 shift[4] = {};
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (bias && (j + i) * 8 < t.cols)
                shift[i] = to_pair(*reinterpret_cast<const uint32_t *>(bias + (j + i) * 8 + q * 2));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            bool there = row + half * 8 < t.rows && (j + q) * 8 < t.cols;
            uint4 *at = reinterpret_cast<uint4 *>(c + half * 8 * p.ldc + (j + q) * 8);
            uint32_t v[4] = {};
            if (p.add) {
                uint4 old = there ? *at : make_uint4(0, 0, 0, 0);
                v[0] = old.x, v[1] = old.y, v[2] = old.z, v[3] = old.w;
                transpose_quad(v);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *x = sum + (j + i) * 4 + half * 2;
                float2 old = to_pair(v[i]);
                v[i] = from_pair(x[0] + shift[i].x + old.x, x[1] + shift[i].y + old.y);
            }
            transpose_quad(v);
            if (there)
                *at = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
}

/* The same for a weight gradient. A warp puts its 16 rows into shared memory, from where they leave
 * while the next products run. */
template <int N>
static __device__ __forceinline__ void
put_weights(shared_part<true> &s, const grouped_product &p, const tile &t, int group,
            ring<shape_of<true>::stages> &at, const float *sum)
{
    int lane = lane_id(), row = group * BOX + ((int)threadIdx.x >> 5 & 3) * OUT_ROWS;
    bool odd = lane & 1; /* pairs of lanes exchange halves: each has 4 columns of one 8 */
    int within = (odd ? 32 : 0) + (lane >> 1 & 1) * 16;
    uint8_t *out = s.out[threadIdx.x / 32], *to = out + lane / 4 * OUT_PITCH + within;
    float *c = static_cast<float *>(p.c) + (t.expert * p.m + t.row + row + lane) * p.ldc + t.col;
#pragma unroll
    for (int first = 0; first < N; first += OUT_COLS) {
        if (first >= t.cols)
            break;
        bulk_wait_read();
        __syncwarp();
#pragma unroll
        for (int piece = first; piece < first + OUT_COLS; piece += PIECE_COLS) {
            const uint8_t *old = s.b[at.at] + (row + lane / 4) * STRIP_PITCH + within;
            bool read = piece < t.read;
            if (read)
                barrier_wait(&s.full[at.at], at.parity);
#pragma unroll
            for (int j = piece / 8; j < (piece + PIECE_COLS) / 8; j += 2)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float *x = sum + j * 4 + half * 2, *y = x + 4;
                    float s0 = __shfl_xor_sync(0xffffffffu, odd ? x[0] : y[0], 1);
                    float s1 = __shfl_xor_sync(0xffffffffu, odd ? x[1] : y[1], 1);
                    float4 v =
                        odd ? make_float4(s0, s1, y[0], y[1]) : make_float4(x[0], x[1], s0, s1);
                    if (read) {
                        float4 o = *reinterpret_cast<const float4 *>(
                            old + (j * 8 - piece) / STRIP_COLS * STRIP_BYTES +
                            half * 8 * STRIP_PITCH);
                        v.x += o.x, v.y += o.y, v.z += o.z, v.w += o.w;
                    }
                    *reinterpret_cast<float4 *>(to + half * 8 * OUT_PITCH + (j * 8 - first) * 4) =
                        v;
                }
            if (read) {
                __syncwarp();
                if (lane == 0)
                    barrier_arrive(&s.empty[at.at]);
                at.advance();
            }
        }
        publish();
        __syncwarp();
        if (lane < OUT_ROWS && row + lane < t.rows)
            bulk_store(c + first, out + lane * OUT_PITCH,
                       min((int)OUT_COLS, t.cols - first) * (int)sizeof(float),
                       p.add && t.read == 0);
        bulk_commit();
    }
}

template <bool WEIGHTS, bool B_DEEP, int N>
static __device__ __forceinline__ void make_tile(shared_part<WEIGHTS> &s, const grouped_product &p,
                                                 const tile &t, int slices, int group,
                                                 ring<shape_of<WEIGHTS>::stages> &at)
{
    float sum[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        sum[i] = 0;
    multiply<WEIGHTS, B_DEEP, N>(s, slices, group, at, sum);
    if constexpr (WEIGHTS)
        put_weights<N>(s, p, t, group, at, sum);
    else
        put_rows<N>(p, t, group, sum);
}

/* A warpgroup. */
template <bool WEIGHTS, bool B_DEEP>
static __device__ __forceinline__ void make_tiles(shared_part<WEIGHTS> &s, const grouped_product &p,
                                                  int group)
{
    ring<shape_of<WEIGHTS>::stages> at = { 0, 0 };
    ring<TILES> tiles = { 0, 0 };
    for (;;) {
        tile t = take_tile(s, tiles);
        int slices = slices_of(t);
        if (t.expert < 0)
            break;
        if (t.rows <= group * BOX)
            pass_over(s, slices + pieces_of(t), at);
        else if (t.cols > COLS / 2)
            make_tile<WEIGHTS, B_DEEP, COLS>(s, p, t, slices, group, at);
        else
            make_tile<WEIGHTS, B_DEEP, COLS / 2>(s, p, t, slices, group, at);
    }
    bulk_wait();
}

/* ---- the kernel ------------------------------------------------------------------------------
 */

template <bool WEIGHTS> static __device__ void open_barriers(shared_part<WEIGHTS> &s)
{
    for (int i = 0; i < shape_of<WEIGHTS>::stages; i++) {
        barrier_init(&s.full[i], shape_of<WEIGHTS>::filled_by);
        barrier_init(&s.loaded[i], 1);
        barrier_init(&s.empty[i], MULTIPLIERS);
    }
    for (int i = 0; i < TILES; i++) {
        barrier_init(&s.told[i], 1);
        barrier_init(&s.taken[i], MULTIPLIERS + (WEIGHTS ? 1 : 0));
    }
    barriers_ready();
}

template <bool WEIGHTS, bool B_DEEP>
static __global__ void __launch_bounds__(THREADS, 1)
    grouped_kernel(const __grid_constant__ tensor_maps maps,
                   const __grid_constant__ grouped_product p)
{
    extern __shared__ uint8_t memory[];
    uintptr_t aligned = (reinterpret_cast<uintptr_t>(memory) + 1023) / 1024 * 1024;
    shared_part<WEIGHTS> &s = *reinterpret_cast<shared_part<WEIGHTS> *>(aligned);
    /* The same in all lanes, which the compiler must see. */
    int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / GROUP, 0);
    if (threadIdx.x == 0)
        open_barriers(s);
    make_table(s, p);
    if (group < 2) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        make_tiles<WEIGHTS, B_DEEP>(s, p, group);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        int warp = (int)threadIdx.x / 32 - MULTIPLIERS;
        if (warp == 0 && lane_id() == 0)
            feed<WEIGHTS, B_DEEP>(s, p, maps);
        if constexpr (WEIGHTS)
            if (warp == 1)
                clear_tails(s);
    }
}

/* ---- launches --------------------------------------------------------------------------------
 */

/* `count` matrices of rows x cols, one after the other, of which boxes are moved. */
struct matrices {
    const void *data;
    int64_t rows, cols, ld, count;
};

static bool encode_map(const cuda_device *d, const matrices &x, CUtensorMapDataType dtype,
                       int element, int box_cols, int box_rows, CUtensorMapSwizzle swizzle,
                       CUtensorMap *ret)
{
    if (x.ld * element % 16 != 0)
        return false; /* as a single row may have it */
    PFN_cuTensorMapEncodeTiled_v12000 encode =
        reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(d->tensor_map_encoder);
    const cuuint64_t dims[3] = { (cuuint64_t)x.cols, (cuuint64_t)x.rows, (cuuint64_t)x.count };
    const cuuint64_t strides[2] = { (cuuint64_t)(x.ld * element),
                                    (cuuint64_t)(x.rows * x.ld * element) };
    const cuuint32_t box[3] = { (cuuint32_t)box_cols, (cuuint32_t)box_rows, 1 };
    const cuuint32_t every[3] = { 1, 1, 1 };
    return encode(ret, dtype, 3, const_cast<void *>(x.data), dims, strides, box, every,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

static bool map_operand(const cuda_device *d, const matrices &x, CUtensorMap *ret)
{
    return encode_map(d, x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, BOX, BOX,
                      CU_TENSOR_MAP_SWIZZLE_128B, ret);
}

static bool map_strips(const cuda_device *d, const matrices &x, CUtensorMap *ret)
{
    return encode_map(d, x, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, STRIP_COLS, ROWS,
                      CU_TENSOR_MAP_SWIZZLE_NONE, ret);
}

template <bool WEIGHTS, bool B_DEEP>
static void launch(cuda_queue *q, const grouped_product &p, const tensor_maps &maps)
{
    const int bytes = (int)sizeof(shared_part<WEIGHTS>) + 1024;
    /* At most one tile of each expert is not full. */
    int64_t down = WEIGHTS ? ceil_div(p.m, ROWS) * p.experts
                           : p.m / ROWS + (p.experts < p.m ? p.experts : p.m);
    int64_t most = down * ceil_div(p.n, COLS), blocks = q->device->multiprocessors;
    if (cuda_ok(q->device,
                cudaFuncSetAttribute(grouped_kernel<WEIGHTS, B_DEEP>,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                "grouped_linear"))
        grouped_kernel<WEIGHTS, B_DEEP>
            <<<(unsigned)(most < blocks ? most : blocks), THREADS, bytes, q->stream>>>(maps, p);
}

bool grouped_wgmma_runs(const cuda_device *d)
{
    return d->tensor_map_encoder != NULL;
}

static bool map_all(const cuda_device *d, const grouped_product *p, bool a_deep, bool b_deep,
                    tensor_maps *ret)
{
    int64_t tokens = p->tokens > 0 ? p->tokens : 1; /* a map is of something */
    if (a_deep)
        return map_operand(d, { p->a, tokens, p->m, p->lda, 1 }, &ret->a) &&
               map_operand(d, { p->b, tokens, p->n, p->ldb, 1 }, &ret->b) &&
               (!p->add || map_strips(d, { p->c, p->m, p->n, p->ldc, p->experts }, &ret->c));
    int64_t rows = b_deep ? p->k : p->n, cols = b_deep ? p->n : p->k;
    return map_operand(d, { p->a, p->m, p->k, p->lda, 1 }, &ret->a) &&
           map_operand(d, { p->b, rows, cols, p->ldb, p->experts }, &ret->b);
}

bool grouped_wgmma(cuda_queue *q, const grouped_product *p, bool a_deep, bool b_deep)
{
    tensor_maps maps = {};
    bool pairs = (uintptr_t)p->bias % 4 == 0 && p->ld_bias % 2 == 0;
    if (p->experts > MAX_EXPERTS || !pairs || !map_all(q->device, p, a_deep, b_deep, &maps))
        return false;
    if (a_deep)
        launch<true, true>(q, *p, maps);
    else if (b_deep)
        launch<false, true>(q, *p, maps);
    else
        launch<false, false>(q, *p, maps);
    return true;
}

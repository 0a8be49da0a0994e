/* SPDX-License-Identifier: Apache-2.0
 *
 * log_decay: -e^a_log softplus(a + dt_bias). A block has a head and walks its tokens, so that the
 * sums over them have one order.
 */
#include "../common.cuh"

enum { DECAY_THREADS = 256, IN_A = 0, IN_A_LOG = 1, IN_DT_BIAS = 2 };

struct decay_args {
    const void *a, *a_log, *dt_bias;
    bool a_log_stat, dt_bias_stat; /* in the statistics dtype */
    const void *dg;
    void *g, *da, *d_log, *d_bias; /* gradients NULL: not wanted */
    int64_t a_ld, g_ld, dg_ld, da_ld, rows;
    bool add_a, add_log, add_bias;
};

template <typename T> static __device__ double param(const void *p, bool stat, int i)
{
    return stat ? (double)static_cast<const real<T> *>(p)[i]
                : (double)to_real(static_cast<const T *>(p)[i]);
}

static __device__ double softplus(double z)
{
    return fmax(z, 0.0) + log1p(exp(-fabs(z)));
}

static __device__ double sigmoid(double z)
{
    double e = exp(-fabs(z));
    return (z < 0 ? e : 1.0) / (1.0 + e);
}

template <typename T> static __global__ void decay_kernel(decay_args a)
{
    int head = (int)blockIdx.x;
    double rate = exp(param<T>(a.a_log, a.a_log_stat, head));
    double bias = param<T>(a.dt_bias, a.dt_bias_stat, head);
    for (int64_t t = threadIdx.x; t < a.rows; t += DECAY_THREADS) {
        double z = (double)to_real(static_cast<const T *>(a.a)[t * a.a_ld + head]) + bias;
        static_cast<real<T> *>(a.g)[t * a.g_ld + head] = (real<T>)(-rate * softplus(z));
    }
}

template <typename T> static __global__ void decay_grad_kernel(decay_args a)
{
    typedef real<T> R;
    __shared__ double shared[32];
    int head = (int)blockIdx.x;
    double rate = exp(param<T>(a.a_log, a.a_log_stat, head)), by_log = 0, by_bias = 0;
    double bias = param<T>(a.dt_bias, a.dt_bias_stat, head);
    for (int64_t t = threadIdx.x; t < a.rows; t += DECAY_THREADS) {
        double z = (double)to_real(static_cast<const T *>(a.a)[t * a.a_ld + head]) + bias;
        double dg = (double)static_cast<const R *>(a.dg)[t * a.dg_ld + head];
        double dz = -dg * rate * sigmoid(z);
        by_log -= dg * rate * softplus(z);
        by_bias += dz;
        if (a.da) {
            T *to = static_cast<T *>(a.da) + t * a.da_ld + head;
            *to = from_real<T>((R)(dz + (a.add_a ? (double)to_real(*to) : 0)));
        }
    }
    by_log = block_sum(by_log, shared);
    by_bias = block_sum(by_bias, shared);
    if (threadIdx.x != 0)
        return;
    R *d_log = static_cast<R *>(a.d_log), *d_bias = static_cast<R *>(a.d_bias);
    if (d_log)
        d_log[head] = (R)(by_log + (a.add_log ? (double)d_log[head] : 0));
    if (d_bias)
        d_bias[head] = (R)(by_bias + (a.add_bias ? (double)d_bias[head] : 0));
}

static decay_args args_of(const mt_op_call *c)
{
    const mt_tensor *a = &c->in[IN_A];
    decay_args args = {};
    args.a = a->data;
    args.a_ld = a->ld;
    args.rows = a->rows;
    args.a_log = c->in[IN_A_LOG].data;
    args.a_log_stat = c->in[IN_A_LOG].dtype != a->dtype;
    args.dt_bias = c->in[IN_DT_BIAS].data;
    args.dt_bias_stat = c->in[IN_DT_BIAS].dtype != a->dtype;
    return args;
}

template <typename T> static void forward(cuda_queue *q, const decay_args &a, int64_t heads)
{
    decay_kernel<T><<<(unsigned)heads, DECAY_THREADS, 0, q->stream>>>(a);
}

static void log_decay_forward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    decay_args a = args_of(c);
    (void)d;
    a.g = c->out[0].data;
    a.g_ld = c->out[0].ld;
    FOR_DTYPE(c->in[IN_A].dtype, forward, q, a, c->in[IN_A].cols);
}

template <typename T> static void backward(cuda_queue *q, const decay_args &a, int64_t heads)
{
    decay_grad_kernel<T><<<(unsigned)heads, DECAY_THREADS, 0, q->stream>>>(a);
}

static void log_decay_backward(cuda_device *d, cuda_queue *q, const mt_op_call *c)
{
    decay_args a = args_of(c);
    (void)d;
    a.dg = c->d_out[0].data;
    a.dg_ld = c->d_out[0].ld;
    a.da = c->d_in[IN_A].data;
    a.da_ld = c->d_in[IN_A].ld;
    a.d_log = c->d_in[IN_A_LOG].data;
    a.d_bias = c->d_in[IN_DT_BIAS].data;
    a.add_a = c->d_accumulate >> IN_A & 1u;
    a.add_log = c->d_accumulate >> IN_A_LOG & 1u;
    a.add_bias = c->d_accumulate >> IN_DT_BIAS & 1u;
    FOR_DTYPE(c->in[IN_A].dtype, backward, q, a, c->in[IN_A].cols);
}

const cuda_op cuda_op_log_decay = { log_decay_forward, log_decay_backward, NULL };

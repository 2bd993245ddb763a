// How DEFT shares k out over layers and layers over workers; hpcsgd/parts/sparsifiers/deft.py has the same in Python.
#include <algorithm>
#include <cmath>
#include <functional>
#include <new>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

#include "kernels.h"

namespace {

std::vector<int64_t> descending(const std::vector<double>& values) {
    std::vector<int64_t> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return values[a] > values[b]; });
    return order;
}

// Layers with anything that is not a number come first, since that is to reach everybody at once.
std::vector<double> finite_norms(const double* squared_norms, int64_t layers) {
    std::vector<double> norms(layers);
    bool finite = true;
    for (int64_t i = 0; i < layers; ++i) {
        norms[i] = std::sqrt(squared_norms[i]);
        finite = finite && std::isfinite(norms[i]);
    }
    if (!finite)
        for (double& norm : norms) norm = std::isfinite(norm) ? 0.0 : 1.0;
    return norms;
}

void assign(const std::vector<double>& norms, const int64_t* bounds, int64_t k_remain, int64_t* k) {
    const std::vector<int64_t> order = descending(norms);
    std::vector<double> norm_remain(order.size() + 1);  // of a layer and those after it, the smallest added first
    for (size_t i = order.size(); i-- > 0;) norm_remain[i] = norm_remain[i + 1] + norms[order[i]];
    int64_t room = bounds[order.size()] - bounds[0];
    for (size_t i = 0; i < order.size(); ++i) {
        const int64_t layer = order[i], size = bounds[layer + 1] - bounds[layer];
        room -= size;
        const double share = norm_remain[i] > 0 ? double(k_remain) * norms[layer] / norm_remain[i] : 0.0;
        k[layer] = std::max(std::min({int64_t(std::nearbyint(share)), size, k_remain}), k_remain - room);
        k_remain -= k[layer];
    }
}

void allocate(const int64_t* bounds, const int64_t* k, int64_t layers, int64_t workers, int32_t* bins) {
    std::vector<double> costs(layers);
    for (int64_t i = 0; i < layers; ++i)
        costs[i] = k[i] ? double(bounds[i + 1] - bounds[i]) * std::max(1.0, std::log2(double(k[i]))) : 0.0;
    using Load = std::pair<double, int32_t>;
    std::priority_queue<Load, std::vector<Load>, std::greater<Load>> loads;
    for (int32_t bin = 0; bin < workers; ++bin) loads.push({0.0, bin});
    for (int64_t layer : descending(costs)) {
        const Load least = loads.top();
        loads.pop();
        bins[layer] = least.second;
        loads.push({least.first + costs[layer], least.second});
    }
}

}  // namespace

HPCSGD_API int64_t hpcsgd_share_out(const double* squared_norms, const int64_t* bounds, int64_t layers, int64_t total,
                                    int64_t floor, int64_t workers, int64_t* k, int32_t* bins) {
    try {
        assign(finite_norms(squared_norms, layers), bounds, total, k);
        for (int64_t i = 0; i < layers; ++i) k[i] = std::max(k[i], std::min(floor, bounds[i + 1] - bounds[i]));
        allocate(bounds, k, layers, workers, bins);
        return 0;
    } catch (const std::bad_alloc&) {
        return OUT_OF_MEMORY;
    }
}

#!/bin/sh
# Rebuilds scatterplot.min.js, the component of the page that draws points with WebGL. Needs npm.
set -e
target=$(cd "$(dirname "$0")" && pwd)/scatterplot.min.js
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
cd "$work"
# regl-scatterplot has copies of kdbush and of simplify-js in its source. They are installed for their licences.
npm install --silent --ignore-scripts regl-scatterplot@1.16.0 kdbush@4.0.2 simplify-js@1.2.4
npm install --silent --prefix esbuild esbuild@0.28.2
echo 'export { default, createRenderer } from "regl-scatterplot";' > entry.js
esbuild/node_modules/.bin/esbuild entry.js --bundle --minify --format=iife --global-name=reglScatterplot \
    --legal-comments=none --outfile=bundle.js
{
    echo "/* Built by build_scatterplot.sh from these packages:"
    find node_modules -name package.json | grep -E 'node_modules/(@[^/]+/)?[^/@]+/package.json$' | sort | while read -r file; do
        folder=$(dirname "$file")
        node -p 'const { name, version, license } = JSON.parse(fs.readFileSync(process.argv[1])); `\n--- ${name} ${version}, ${license}\n`' "$file"
        cat "$folder"/LICENSE*
    done
    echo "*/"
    cat bundle.js
} > "$target"

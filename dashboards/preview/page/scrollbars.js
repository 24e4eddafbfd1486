// A CommonJS module whose default export bundlers take for the whole module.
export { Scrollbars as default } from '../node_modules/react-custom-scrollbars-2/lib/index.js';
